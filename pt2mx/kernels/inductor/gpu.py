"""The functions of `pt2mx.kernels.elements` for Inductor's Triton, to the bit: all but one are the definition."""

import torch
from torch import Tensor
from torch._inductor import lowering
from torch._inductor.ir import TensorBox
from torch._inductor.virtualized import V

from pt2mx.kernels.axis import has_length, trim_axis
from pt2mx.kernels.elements import decode, realize, realize_if_costly, round_to_element

__all__ = ["decode", "from_blocks", "realize", "realize_if_costly", "round_to_element"]

#: computes nothing: the blocks as values, contiguous; the lowering puts channels last where convolutions of the graph
#: want that
torch.library.define("pt2mx::join_blocks", "(Tensor blocks, int axis) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("pt2mx::join_blocks", "CompositeExplicitAutograd")
@torch.library.register_fake("pt2mx::join_blocks")
def _join_blocks(blocks: Tensor, axis: int) -> Tensor:
    return blocks.clone(memory_format=torch.contiguous_format).flatten(axis, axis + 1)


@lowering.register_lowering(torch.ops.pt2mx.join_blocks, type_promotion_kind=None)
def _lower_join_blocks(blocks: TensorBox, axis: int) -> TensorBox:
    """The values are written by the kernel that quantizes the blocks, which it does not where it has to guess their
    order in memory: another kernel copies them into the order that their user asks for."""
    order = list(range(len(blocks.get_size()) - 1))  # from the outermost in memory to the innermost
    if len(order) == 4 and axis == 1 and V.graph.layout_opt:  # convolutions of this graph want the channels last
        order = [0, 2, 3, 1]
    values = lowering.clone(lowering.permute(blocks, _of_blocks(order, axis)))
    values.realize()
    values.freeze_layout()
    sizes, at = list(values.get_size()), order.index(axis)
    values = lowering.view(values, [*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]])
    return lowering.permute(values, [order.index(d) for d in range(len(order))])


def from_blocks(blocks: Tensor, axis: int, length: int) -> Tensor:
    """(..., blocks, block, ...) -> (..., length, ...), contiguous but for what is cut off.

    In memory of its own, of which the heads of an attention are views; else each of them would be a copy. Ragged
    blocks of the last dimension are cut where they are read: from memory, that would take another kernel.
    """
    values = blocks.flatten(axis, axis + 1)
    if axis == values.dim() - 1 and not has_length(values, axis, length):
        return values.narrow(axis, 0, length)
    return trim_axis(torch.ops.pt2mx.join_blocks(blocks, axis), axis, length)


def _of_blocks(order: list[int], axis: int) -> list[int]:
    """`order` of the dimensions of the values -> that of the blocks, each after the number of its block."""
    return [d + (d > axis) + more for d in order for more in ((0, 1) if d == axis else (0,))]
