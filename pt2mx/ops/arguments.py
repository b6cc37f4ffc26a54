"""Arguments that mean the same in several operators: annotations of the fields of `pt2mx.ops.operator.Operator`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch

from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS, SCALE_MODES
from pt2mx.ops.operator import As, T
from pt2mx.scale_formats import SCALE_FORMATS


def choices(names: Iterable[str]) -> str:
    """Return names as the contract writes them."""
    return ", ".join(f"`{name}`" for name in names)


Element = Annotated[
    str, As("elem_dtype_name"), "the element, by its name in the table above or another key of `pt2mx.ELEMENTS`"
]
BlockSize = Annotated[int, "values that share a scale, at least 1; the last block along the axis may be shorter"]
Axis = Annotated[int, "the dimension along which blocks run and codes are packed"]
ScaleMode = Annotated[str, f"how a block's scale follows from its values: {choices(SCALE_MODES)}"]
#: of an operator that takes any scale format
AnyScaleMode = Annotated[
    str,
    f"how a block's scale follows from its values: {choices(SCALE_MODES)}; of scales with a significand "
    f"{choices(FLOAT_SCALE_MODES)}",
]
Rounding = Annotated[str, f"how values are rounded: {choices(ROUNDINGS)}"]
#: of an operator that draws no random numbers
PlainRounding = Annotated[
    str, f"how values are rounded: {choices(name for name in ROUNDINGS if not ROUNDINGS[name].random)}"
]
#: An integer, also a symbolic one; in a graph it may be a node.
Seed = Annotated[
    Any,
    As(type="SymInt?"),
    "of `stochastic`, 0 to 2**63 - 1; None draws one from torch's default generator. Other roundings ignore it",
]
Rotation = Annotated[int, "blocks of x that `hadamard` rotates along K first, rounded to x's dtype; 0 for none"]
TargetDtype = Annotated[torch.dtype | None, "the dtype of the result; None: that of x"]
Activation = Annotated[str, f"what is computed of x: {choices(ACTIVATIONS)}"]
#: of height and width
Pair = Annotated[Sequence[int], As(type="int[2]"), "of height and width, at least 1"]

#: the scale formats with a scale of the whole tensor
TENSOR_SCALED = choices(name for name, scale in SCALE_FORMATS.items() if scale.tensor)


ScaleFormatName = Annotated[str | None, f"the format of scales: {choices(SCALE_FORMATS)}; None: `e8m0`"]
BlockRows = Annotated[
    int | None,
    "rows of a block, along the one of the last two dimensions that is not the axis, or along the dimension before "
    "the axis where the axis is neither; None: 1",
]
ScaleOfTensor = Annotated[T | None, f"() or (1,) float32, the scale of the whole tensor, of {TENSOR_SCALED}"]

#: the arguments of codes
CODES = {"element": Element, "block_size": BlockSize}
#: the arguments of values that are quantized along the last dimension where they are computed
ROWS = {**CODES, "scale_mode": ScaleMode, "rounding": PlainRounding}
#: the arguments of scales, the last ones of an operator but for those of a whole tensor
SCALES = {"scale_format": ScaleFormatName, "block_rows": BlockRows}
#: of an operator that takes blocks of one row
ROW_SCALES = {"scale_format": ScaleFormatName}

VALUES = "(..., n, ...) float32, float16 or bfloat16 of any strides, n values along the axis"
WEIGHT_CODES = "(N, bytes of K) uint8, packed along K, which is the axis"
WEIGHT_SCALE = "(N, ceil(K / block_size)), as `quantize_mx` gives it"
