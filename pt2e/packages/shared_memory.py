"""Inputs that share memory. Compiled code assumes that inputs that it writes to do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from pt2mx.errors import MXError


def check_shared_memory(inputs: Mapping[str, object], written: Iterable[str]) -> None:
    """Refuse an input that is written to and shares memory with another: compiled code may read the other before or
    after it writes.

    Args:
        inputs: the inputs by their names.
        written: the names of those that the call writes to.

    Raises:
        MXError: for such a pair; it names both.
    """
    spans = {name: _span(leaf) for name, leaf in inputs.items() if isinstance(leaf, Tensor) and leaf.numel()}
    for name in spans.keys() & set(written):
        for other, span in spans.items():
            if other != name and _overlap(spans[name], span):
                raise MXError(
                    f"the input {name!r} is written to, and shares memory with {other!r}: pass a clone of one of them"
                )


def _span(tensor: Tensor) -> tuple[object, int, int]:
    """Return the device of a tensor, the address at which it begins, and that at which it ends."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _overlap(one: tuple[object, int, int], other: tuple[object, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
