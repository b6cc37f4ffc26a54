"""Quantize a tensor to MX blocks by `mx_specs`; the names of formats and roundings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from pt2mx.compat import PRESETS
from pt2mx.errors import MXError, nearest
from pt2mx.microxcaling.specs import apply_mx_specs
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
    """Quantize A, (..., n, ...), to MX blocks and dequantize it, as microxcaling's function does; no gradient passes.

    Blocks run along one dimension, `axes`. `expand_and_reshape` changes nothing.

    Raises:
        MXError: for unknown formats, roundings and specs, and for blocks along several dimensions.
    """
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
    dims = axes if isinstance(axes, list | tuple) else [axes]
    if len(dims) != 1 or type(dims[0]) is not int:
        raise MXError(f"axes={axes!r}: blocks run along one dimension, an integer or a list of one")
    return dims[0]


class ElemFormat(Enum):
    """microxcaling's `ElemFormat`: element formats by number; a number may have several names.

    The 16-bit floats only reserve their numbers: MX blocks have no such elements.
    """

    int8 = 1
    int4 = 2
    int2 = 3
    fp8_e5m2 = 4
    fp8_e4m3 = 5
    fp6_e3m2 = 6
    fp6_e2m3 = 7
    fp4 = 8
    fp4_e2m1 = 8
    float16 = 9
    fp16 = 9
    bfloat16 = 10
    bf16 = 10

    @staticmethod
    def from_str(s: str) -> ElemFormat:
        """Return the format of a name in upper or lower case; raise `MXError` for another name."""
        names = ElemFormat.__members__
        if not isinstance(s, str) or s.lower() not in names:
            raise MXError(f"unknown elem_format {s!r}: {nearest(s, names)}")
        return names[s.lower()]


#: roundings by name, as `pt2mx.modes` calls them
ROUNDINGS = {"nearest": "half_away", "floor": "toward_zero", "even": "even", "dither": "stochastic"}


def element_name(elem_format: ElemFormat | str) -> str:
    """Return the element's name in pt2mx.

    Raises:
        MXError: for an unknown format, and for 16-bit floats, which are no elements of MX blocks.
    """
    if not isinstance(elem_format, ElemFormat):
        elem_format = ElemFormat.from_str(elem_format)
    if elem_format in (ElemFormat.float16, ElemFormat.bfloat16):
        raise MXError(
            f"{elem_format.name} is no element of MX blocks: bfloat=16 and fp=16 in mx_specs round without blocks"
        )
    return elem_format.name


def rounding_name(round: str) -> str:
    """Return the rounding's name in pt2mx; `MXError` for an unknown one."""
    if not isinstance(round, str) or round not in ROUNDINGS:
        raise MXError(f"unknown round {round!r}: {nearest(round, ROUNDINGS)}")
    return ROUNDINGS[round]
