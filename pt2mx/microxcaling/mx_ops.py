"""MX quantization of a tensor by `mx_specs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pt2mx.compat import PRESETS
from pt2mx.errors import MXError
from pt2mx.microxcaling.formats import ElemFormat, element_name, rounding_name
from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test
from pt2mx.ops.checks import check_tensors


@torch.no_grad()
def quantize_mx_op(
    A: Tensor,
    mx_specs: Mapping[str, object] | None,
    elem_format: ElemFormat | str | None = None,
    block_size: int | None = None,
    axes: int | Sequence[int] | None = None,
    round: str = "nearest",
    expand_and_reshape: bool = False,
) -> Tensor:
    """Quantize to MX blocks and dequantize, as `mx.quantize_mx_op` of microxcaling does.

    No gradient passes: layers and `linear`, `matmul`, ... define theirs.

    Args:
        A: (..., n, ...) float32, float16 or bfloat16.
        mx_specs: `scale_bits`, `block_size`, `shared_exp_method` and `mx_flush_fp32_subnorms` of it are read.
        elem_format: the format, or None, for A as it is.
        block_size: instead of that of the specs; 0 for the whole dimension.
        axes: the dimension along which blocks run, or a sequence of that one.
        round: "nearest", "floor", "even" or "dither".
        expand_and_reshape: changes nothing.

    Returns:
        (..., n, ...) in the dtype of A.

    Raises:
        MXError: for other values; for blocks along more than one dimension.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> A = torch.tensor([1.0, 2.9, -5.9, 0.3])
        >>> mx.quantize_mx_op(A, {"block_size": 4}, "fp4_e2m1", axes=-1)
        tensor([ 1.0000,  3.0000, -6.0000,  0.5000])
    """
    mx_assert_test(mx_specs)
    if elem_format is None:
        return A
    check_tensors(A=A)
    if mx_specs is None:
        raise MXError("quantize_mx_op: mx_specs is None, and elem_format is not: pass mx_specs")
    specs = apply_mx_specs(mx_specs)
    fields = {
        "axis": _axis(axes),
        "rounding": rounding_name(round),
        "scale_exp_bits": specs["scale_bits"] or 8,
        "block_size": specs["block_size"] if block_size is None else block_size,
    }
    if specs["shared_exp_method"] == "none":
        fields["block_size"] = 1
    elif specs["shared_exp_method"] != "max":
        raise MXError(f"unknown shared_exp_method {specs['shared_exp_method']!r}: allowed: max, none")
    elif fields["block_size"] == 0:
        fields["block_size"] = max(A.numel(), 1)
    preset = PRESETS["microxcaling_flush" if specs["mx_flush_fp32_subnorms"] else "microxcaling"]
    return preset.fake_quantize(A, element_name(elem_format), **fields)


def _axis(axes: int | Sequence[int] | None) -> int:
    given = axes if isinstance(axes, list | tuple) else [axes]
    if len(given) != 1 or type(given[0]) is not int:
        raise MXError(f"axes={axes!r}: blocks run along one dimension, an integer or a list of one")
    return given[0]
