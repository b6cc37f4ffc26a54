"""Block-scaled matmuls and quantization on the CPU, compared with what peer libraries gave. The patches of
`notebooks/upstream/` add them to torch, and `test_patches.py` runs these tests with a patched one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from pt2mx import dequantize_mx, quantize_mx
from pt2mx.kernels.scaled_mm import swizzle
from tests.golden import ENTRIES, GOLDEN

if not hasattr(F, "quantize_tensor"):
    pytest.skip("torch has no torch.nn.functional.quantize_tensor", allow_module_level=True)

NVFP4 = np.load(Path(__file__).parents[1] / "pt2mx" / "nvfp4.npz")
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "fp4_e2m1": torch.float4_e2m1fn_x2}
MX = {"inner_scale_calc": F.InnerScaleCalc.RCEIL_E8M0, "scaling_type": ScalingType.BlockWise1x32}
NV_TYPES = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
SWIZZLE = SwizzleType.SWIZZLE_32_4_4


def multiply(x, scale, weight, weight_scale, dtype=torch.float32, types=ScalingType.BlockWise1x32, bias=None):
    """x: (M, K), weight: (N, K) -> (M, N)"""
    swizzles = [SWIZZLE] if isinstance(types, ScalingType) else [SWIZZLE, SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(x, weight.t(), scale, types, weight_scale, types, swizzles, swizzles, bias, dtype)


def quantize(x, dtype=torch.float8_e4m3fn):
    return F.quantize_tensor(x, qdata_dtype=dtype, swizzle_type=SWIZZLE, **MX)


def recorded(fmt):
    """The results that follow the specification, of whole blocks rounded to nearest even, and their inputs (M, K)."""
    for entry in ENTRIES:
        what = tuple(entry.get(key) for key in ("fmt", "block", "axis", "round", "expect"))
        # torchao 0.18.0 has a rounded log2 in the scales of FP4
        modes = ("floor", "ceil", "even") + ("rceil",) * ((entry["lib"], fmt) != ("torchao_0180", "fp4_e2m1"))
        x = torch.from_numpy(GOLDEN["in/" + entry["input"]])
        is_whole = what == (fmt, 32, -1, "even", "exact") and x.shape[-1] % 32 == 0
        if is_whole and entry["scale_mode"] in modes and "dq" in entry and not entry.get("flush"):
            yield entry, x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize(("fmt", "count"), [("fp8_e4m3", 177), ("fp8_e5m2", 161), ("fp4_e2m1", 165)])
def test_equals_the_peers(fmt, count):
    """A product with the identity gives the values of the codes."""
    results = list(recorded(fmt))
    assert len(results) == count
    for entry, x in results:
        dtype, one = DTYPES[fmt], DTYPES[fmt.replace("fp8_e5m2", "fp8_e4m3")]
        scale, codes = quantize_mx(x, f"{fmt}({entry['scale_mode']})")
        want = torch.from_numpy(GOLDEN[entry["dq"]]).float().reshape(x.shape)
        has_nan = want.isnan().any(1)
        y = multiply(*swizzled(scale, codes, dtype), *quantize(torch.eye(x.shape[1]), one))
        y = y.bfloat16().float() if entry["out_dtype"] == "bf16" else y
        assert torch.equal(y[~has_nan], want[~has_nan]) and y[has_nan].isnan().all(), entry
        if entry["scale_mode"] == "rceil":
            got = [tensor.view(torch.uint8) for tensor in F.quantize_tensor(x, qdata_dtype=dtype, **MX)]
            has_values = (scale != 255).repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            assert torch.equal(got[1], scale) and torch.equal(got[0][has_values], codes[has_values]), entry


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp4_e2m1"])
def test_linear_layers_equal_microxcaling(fmt):
    """Ragged blocks are filled with zeros, which change no scale."""
    entries = [e for e in ENTRIES if e.get("op") == "linear" and e["a_fmt"] == e["w_fmt"] == fmt]
    for entry in entries:
        x, weight = (torch.from_numpy(GOLDEN["in/" + entry[name]]).flatten(0, -2) for name in "ab")
        bias = entry["bias"] and torch.from_numpy(GOLDEN["in/" + entry["bias"]])
        padded = (F.pad(tensor, (0, -tensor.shape[1] % 32)) for tensor in (x, weight))
        operands = [tensor for both in padded for tensor in swizzled(*quantize_mx(both, f"mx{fmt[:3]}"), DTYPES[fmt])]
        want = torch.from_numpy(GOLDEN[entry["dq"]]).flatten(0, -2)
        torch.testing.assert_close(multiply(*operands, bias=bias), want, rtol=0, atol=1e-5 * want.abs().max().item())
    assert len(entries) == 2


def swizzled(scale, codes, dtype):
    return codes.view(dtype), swizzle(scale).view(torch.float8_e8m0fnu)


def test_nvfp4_equals_torchao():
    names = sorted({name.rpartition("/x")[0] for name in NVFP4.files if name.endswith("/x")})
    for name in names:
        recorded = {key: torch.from_numpy(NVFP4[f"{name}/torchao/two_level/{key}"]) for key in ("scale", "codes")}
        t, one = torch.from_numpy(NVFP4[f"{name}/torchao/two_level/tensor_scale"]), torch.ones(())
        x = torch.from_numpy(NVFP4[f"{name}/x"]).flatten(0, -2)
        recipe = {"inner_scale_calc": F.InnerScaleCalc.NVFP4_E4M3, "scaling_type": NV_TYPES, "outer_scale": t}
        recipe["qdata_dtype"] = torch.float4_e2m1fn_x2
        codes, scale = F.quantize_tensor(x, **recipe)
        assert torch.equal(codes.view(torch.uint8), recorded["codes"].reshape(codes.shape)), name
        assert torch.equal(scale.view(torch.uint8), recorded["scale"].view(torch.uint8).reshape(scale.shape)), name
        codes, scale = F.quantize_tensor(x, swizzle_type=SWIZZLE, **recipe)
        eye = F.quantize_tensor(6 * torch.eye(x.shape[1]), swizzle_type=SWIZZLE, **recipe | {"outer_scale": one})
        y = multiply(codes, [scale, t], eye[0], [eye[1], one], types=NV_TYPES) / 6
        want = dequantize_mx(recorded["codes"], recorded["scale"], "nvfp4", tensor_scale=t).flatten(0, -2)
        torch.testing.assert_close(y, want, rtol=3e-7, atol=0)
    assert len(names) == 14


def test_scales_neither_overflow_nor_underflow():
    codes, scale = quantize(torch.full((128, 128), 448.0))
    large, small = (scale.clone().view(torch.uint8).fill_(byte).view(scale.dtype) for byte in (254, 0))
    assert torch.equal(multiply(codes, large, codes, small), torch.full((128, 128), 128 * 448.0**2))
    assert multiply(codes, large, codes, scale).isinf().all() and not multiply(codes, small, codes, small).any()


class Layer(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.weight = dtype, quantize(torch.randn(48, 160), dtype)

    def forward(self, x):  # (M, 160) -> (M, 48)
        return multiply(*quantize(x, self.dtype), *self.weight, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float4_e2m1fn_x2], ids=str)
def test_compiled_and_decomposed(dtype):
    model, x = Layer(dtype), torch.randn(5, 160)
    assert torch.equal(torch.compile(model, fullgraph=True, dynamic=True)(x), model(x))
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", max=999)},))
    assert "_scaled_mm_v2" in program.graph_module.code
    decomposed = program.run_decompositions(torch._decomp.get_decompositions([torch.ops.aten._scaled_mm_v2]))
    assert "_scaled_mm" not in decomposed.graph_module.code
    for rows in (5, 300):
        x = torch.randn(rows, 160)
        assert torch.equal(decomposed.module()(x), model(x))


def test_a_matmul_without_scales_of_blocks_is_the_same():
    codes, one = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.tensor(2.0)
    want = (codes.float() @ codes.float().t() * 4).bfloat16()
    assert torch.equal(torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16), want)


def test_refusals():
    (x, scale), few = quantize(torch.randn(128, 160)), torch.zeros(128, 4).to(torch.float8_e8m0fnu)
    recipe = {"input": torch.ones(2, 32), "qdata_dtype": x.dtype, **MX}
    for function, kwargs, message in (
        (multiply, {"x": x, "scale": few, "weight": x, "weight_scale": scale}, "scale_a must have 1024"),
        (multiply, {"x": x[:, :96], "scale": scale, "weight": x, "weight_scale": scale}, "scale_a must have 512"),
        (F.quantize_tensor, recipe | {"qdata_dtype": torch.int8}, "no recipe InnerScaleCalc.RCEIL_E8M0"),
        (F.quantize_tensor, recipe | {"input": torch.ones(2, 33)}, r"expected \(M, a multiple of 32\), got \[2, 33\]"),
        (F.quantize_tensor, recipe | {"outer_scale": torch.ones(())}, "RCEIL_E8M0 takes no outer_scale"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            function(**kwargs)
