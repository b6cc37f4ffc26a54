"""The functions of `pt2mx.kernels.elements` in aten operators that Inductor compiles to the bit, where pt2mx is not
installed.

Inductor's loop splitting for the CPU (`CppScheduling.try_loop_split`, torch 2.11 to 2.13) turns a loop over n values
that reads a scale at `i // block` into `n // block` whole blocks, and leaves the rest of its result unwritten. The form
that shows it: `(x.unflatten(1, (2, 32)) * scale[:, :, None]).flatten(1)[:, :33]`. Ragged blocks are therefore written
to memory before they are cut.
"""

from __future__ import annotations

from torch import Tensor, contiguous_format

from pt2mx.kernels import elements
from pt2mx.kernels.packing import has_length, resized

# with the function below, these are the primitives (`Prims`)
decode = elements.decode
divide = elements.divide
realize = elements.realize
realize_if_costly = elements.realize_if_costly
round_to_element = elements.round_to_element
scale_bytes = elements.scale_bytes
times_scales = elements.times_scales


def from_blocks(blocks: Tensor, axis: int, length: int) -> Tensor:
    """(..., blocks, block, ...) -> (..., length, ...), the filling of the last blocks cut off."""
    x = blocks.flatten(axis, axis + 1)
    if has_length(x, axis, length):
        return x
    x = x.clone(memory_format=contiguous_format)
    # Inductor cuts this in memory, where it would compute a slice's values anew; flat, because it cannot put symbolic
    # strides in order
    return x.view(-1).as_strided(resized(x, axis, length), x.stride())
