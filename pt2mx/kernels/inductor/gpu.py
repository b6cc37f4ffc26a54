"""The functions of `pt2mx.kernels.elements` for Inductor's Triton, to the bit: most are the definition.

Scales are read and written without adding bytes. ptxas (12.8, 13.0) computes two such sums in one instruction, and
sometimes added 0 instead of -127 to a pair, so that one block of every row was wrong.
"""

import torch
from torch import Tensor
from torch._inductor import lowering
from torch._inductor.ir import TensorBox
from torch._inductor.virtualized import OpsValue, V, ops

from pt2mx.kernels import elements
from pt2mx.kernels.elements import BIAS, NAN_SCALE
from pt2mx.kernels.packing import has_length, trim_axis

decode = elements.decode
realize = elements.realize
realize_if_costly = elements.realize_if_costly
round_to_element = elements.round_to_element

_TWO_TO_MINUS_127 = 0x400000  # bits in fp32
_NAN = 0x7FC00000

#: joins blocks to contiguous values, without computing anything; its lowering puts channels last if the graph's
#: convolutions need that
torch.library.define("pt2mx::join_blocks", "(Tensor blocks, int axis) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("pt2mx::join_blocks", "CompositeExplicitAutograd")
@torch.library.register_fake("pt2mx::join_blocks")
def _join_blocks(blocks: Tensor, axis: int) -> Tensor:
    return blocks.clone(memory_format=torch.contiguous_format).flatten(axis, axis + 1)


@lowering.register_lowering(torch.ops.pt2mx.join_blocks, type_promotion_kind=None)
def _lower_join_blocks(blocks: TensorBox, axis: int) -> TensorBox:
    """Fix the memory order, so that the quantizing kernel writes the values directly. Otherwise Inductor guesses the
    order, and another kernel copies the values into the order that their user asks for."""
    order = list(range(len(blocks.get_size()) - 1))  # from the outermost in memory to the innermost
    if len(order) == 4 and axis == 1 and V.graph.layout_opt:  # convolutions of this graph need channels last
        order = [0, 2, 3, 1]
    values = lowering.clone(lowering.permute(blocks, _of_blocks(order, axis)))
    values.realize()
    values.freeze_layout()
    sizes, at = list(values.get_size()), order.index(axis)
    values = lowering.view(values, [*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]])
    return lowering.permute(values, [order.index(d) for d in range(len(order))])


#: x / y, which `/` in Triton only approximates
torch.library.define("pt2mx::divide", "(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("pt2mx::divide", "CompositeExplicitAutograd")
@torch.library.register_fake("pt2mx::divide")
def divide_rounding_to_nearest(x: Tensor, y: Tensor) -> Tensor:
    return x / y


@lowering.register_lowering(torch.ops.pt2mx.divide, broadcast=True, type_promotion_kind=None)
def _lower_divide(x: TensorBox, y: TensorBox) -> TensorBox:
    """Divide in float64: its 53 bits are more than twice 24 and two, so that rounding twice is rounding once."""
    return lowering.make_pointwise(_quotient)(x, y)


def _quotient(x: OpsValue, y: OpsValue) -> OpsValue:
    wide = ops.truediv(ops.to_dtype(x, torch.float64), ops.to_dtype(y, torch.float64))
    return ops.to_dtype(wide, torch.float32)


def divide(x: Tensor, y: Tensor) -> Tensor:
    return torch.ops.pt2mx.divide(x, y)


def times_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """Multiply in one step, by a factor built from the scale's bits: a GPU does not flush 2**-127 to zero."""
    factor = torch.where(scale == 0, _TWO_TO_MINUS_127, scale << 23)
    return blocks * torch.where(scale == NAN_SCALE, _NAN, factor).view(torch.float32)


def scale_bytes(exponent: Tensor, finite: Tensor) -> Tensor:
    """Return the scale bytes; the sum is one of floats, not of bytes."""
    biased = exponent.to(torch.float32) + float(BIAS)
    return torch.where(finite, biased, float(NAN_SCALE)).to(torch.uint8)


def from_blocks(blocks: Tensor, axis: int, length: int) -> Tensor:
    """(..., blocks, block, ...) -> (..., length, ...), contiguous before the padding is cut off.

    The result gets its own memory, so that the heads of an attention are views of it instead of copies. Ragged blocks
    of the last dimension are trimmed where they are read, because trimming in memory would take another kernel.
    """
    values = blocks.flatten(axis, axis + 1)
    if axis == values.dim() - 1 and not has_length(values, axis, length):
        return values.narrow(axis, 0, length)
    return trim_axis(torch.ops.pt2mx.join_blocks(blocks, axis), axis, length)


def _of_blocks(order: list[int], axis: int) -> list[int]:
    """Order of the values' dimensions -> order of the blocks' dimensions, the position in a block after the block's
    number."""
    return [d + (d > axis) + more for d in order for more in ((0, 1) if d == axis else (0,))]
