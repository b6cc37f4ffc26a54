"""A reference of torch's block-scaled matmuls, which torch has on few GPUs alone."""

import torch
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._python_dispatch import TorchDispatchMode

from pt2mx.kernels.scaled_mm import unswizzle

aten = torch.ops.aten
_RECIPE = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
_SWIZZLES = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
#: the values of the codes 0 to 15 of E2M1
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class ScaledMM(TorchDispatchMode):
    """Compute `aten._scaled_mm` and `aten._scaled_mm_v2` of scaled blocks along K, with sums in float64."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._scaled_mm.default:
            x, weight, x_scale, weight_scale, bias, result_scale, dtype = args
            assert bias is None and result_scale is None
            return _matmul(x, weight, [x_scale], [weight_scale], dtype)
        if func is aten._scaled_mm_v2.default:
            x, weight, x_scales, recipe, swizzles, weight_scales, weight_recipe, weight_swizzles, bias, dtype = args
            assert bias is None and (weight_recipe, weight_swizzles) == (recipe, swizzles)
            assert (list(map(ScalingType, recipe)), list(map(SwizzleType, swizzles))) == (_RECIPE, _SWIZZLES)
            return _matmul(x, weight, x_scales, weight_scales, dtype)
        return func(*args, **(kwargs or {}))


def _matmul(x, weight, x_scales, weight_scales, dtype):
    return (_values(x, x_scales) @ _values(weight.t(), weight_scales).t()).to(dtype)


def _values(codes, scales):
    """codes: (R, K), or pairs (R, K / 2), scales: swizzled, and perhaps one of the tensor -> (R, K) float64."""
    assert codes.is_contiguous()
    if codes.dtype == torch.float4_e2m1fn_x2:
        pairs = codes.view(torch.uint8).long()
        values = _FP4[torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)].double()
    else:
        values = codes.double()
    block = 16 if scales[0].dtype == torch.float8_e4m3fn else 32
    scale = unswizzle(scales[0].double().flatten(), codes.shape[0], values.shape[1] // block)
    values = values * scale.repeat_interleave(block, 1)
    return values if len(scales) == 1 else values * scales[1].double()
