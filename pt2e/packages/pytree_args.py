"""Compare the arguments of a call with an example: their nesting, their leaves, and how tensors lie in memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.files.user_errors import OTHER_SIZES
from pt2mx.pt2e.program.sizes import Range


def flatten_by_name(arg: object, names: object, where: str, optional: Container[str] = ()) -> dict[str, object]:
    """Return the leaves of an argument by their names, which are nested as in the example.

    Dicts are matched by keys, tuples and lists by order. A dict may lack leaves that are `optional`.
    """
    if isinstance(names, str):
        return {names: arg}
    if isinstance(names, dict):
        required = {key for key, part in names.items() if not are_all(part, optional)}
        if not isinstance(arg, dict) or not required <= arg.keys() <= names.keys():
            raise MXError(f"{where} must be nested as in the example: a dict of {list(names)}, not {_nesting(arg)}")
        parts = [(arg[key], part, f"{where}[{key!r}]") for key, part in names.items() if key in arg]
    elif isinstance(names, list | tuple):
        if not isinstance(arg, list | tuple) or len(arg) != len(names):
            raise MXError(f"{where} must be nested as in the example: a list of {len(names)}, not {_nesting(arg)}")
        parts = [(part, names[i], f"{where}[{i}]") for i, part in enumerate(arg)]
    else:  # a class that is registered with pytree
        flat, example_tree = pytree.tree_flatten(names)
        leaves, tree = pytree.tree_flatten(arg)
        if tree != example_tree:
            raise MXError(f"{where} must be nested as in the example: {example_tree}, not {tree}")
        return dict(zip(flat, leaves, strict=True))
    leaves_by_name: dict[str, object] = {}
    for part, part_names, part_where in parts:
        leaves_by_name |= flatten_by_name(part, part_names, part_where, optional)
    return leaves_by_name


def are_all(names: object, some: Container[str]) -> bool:
    """Return whether each leaf of a tree of names is one of `some`."""
    return all(name in some for name in pytree.tree_leaves(names))


def _nesting(arg: object) -> str:
    if isinstance(arg, dict):
        return f"a dict of {list(arg)}"
    return f"a list of {len(arg)}" if isinstance(arg, list | tuple) else type(arg).__name__


def check_leaf(
    name: str, leaf: object, example: object, sizes: list[Range] | None, device: torch.device | None = None
) -> None:
    """Raise an error for a leaf of the arguments that the model does not take: another type, dtype, shape or device
    than the example's, a number out of its ranges, or another constant. By default a tensor may be on any device."""
    if sizes is None:
        if type(leaf) is not type(example) or leaf != example:
            raise MXError(
                f"the input {name!r} is the constant {example!r} of the export, and cannot be {_described(leaf)}: "
                "export the model again for another value"
            )
    elif not isinstance(example, Tensor):
        if type(leaf) is not type(example) or not isinstance(leaf, int | float) or not _are_within([leaf], sizes):
            raise MXError(f"the input {name!r} must be a number of {_shown(sizes).rstrip(',')}, not {leaf!r}")
    elif not isinstance(leaf, Tensor) or not _matches_example(leaf, example, sizes):
        text = f"the input {name!r} must be of shape ({_shown(sizes)}) and {example.dtype}, not {_described(leaf)}"
        raise MXError(text + f"; {OTHER_SIZES}" * _has_other_batch(leaf, sizes))
    elif device is not None and leaf.device != device:
        raise MXError(f"the input {name!r} must be on {device}, not on {leaf.device}: move it there")


#: classes of tensors that store their values themselves
_PLAIN = (Tensor, torch.nn.Parameter)


def _matches_example(leaf: Tensor, example: Tensor, sizes: list[Range]) -> bool:
    plain = type(leaf) in _PLAIN and leaf.dtype == example.dtype and leaf.layout == torch.strided
    return plain and leaf.dim() == len(sizes) and _are_within(leaf.shape, sizes)


def _has_other_batch(leaf: object, sizes: list[Range]) -> bool:
    """Return whether a tensor has another first size than the only one that the export allows."""
    if not isinstance(leaf, Tensor) or leaf.dim() != len(sizes) or not sizes:
        return False
    low, high = sizes[0]
    return low == high != leaf.shape[0] and _are_within(leaf.shape[1:], sizes[1:])


def _are_within(values: Iterable[float], ranges: list[Range]) -> bool:
    return all(low <= n and (high is None or n <= high) for n, (low, high) in zip(values, ranges, strict=True))


def _shown(ranges: list[Range]) -> str:
    texts = [str(low) if low == high else f"{low} to {high or 'any'}" for low, high in ranges]
    return f"{texts[0]}," if len(texts) == 1 else ", ".join(texts)


def _described(leaf: object) -> str:
    if isinstance(leaf, int | float | str | bool | None):
        return repr(leaf)
    if isinstance(leaf, Tensor) and type(leaf) in _PLAIN:
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return type(leaf).__name__


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor, from the largest stride to the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda i: (-strides[i], i))


def in_memory_order(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the tensor with its dimensions in this order in memory, without gaps or overlaps."""
    return tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])


def check_shared_memory(inputs: Mapping[str, object], written: Iterable[str]) -> None:
    """Raise an error for an input that is written to and shares memory with another.

    Compiled code may read the other before or after it writes.
    """
    spans = {name: _span(leaf) for name, leaf in inputs.items() if isinstance(leaf, Tensor) and leaf.numel()}
    for name in spans.keys() & set(written):
        device, first, end = spans[name]
        for other, span in spans.items():
            if other != name and span[0] == device and first < span[2] and span[1] < end:
                raise MXError(
                    f"the input {name!r} is written to, and shares memory with {other!r}: pass a clone of one of them"
                )


def _span(tensor: Tensor) -> tuple[object, int, int]:
    """Return the device of a tensor, its first address and the address after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
