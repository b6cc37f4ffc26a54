"""The arguments of a call that a batch describes, checked against the signature that the export will have."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.packages.pytree_args import are_all, check_leaf, flatten_by_name
from pt2mx.pt2e.packages.signature import Signature
from pt2mx.pt2e.program.sizes import Range

#: the range of a number that may be any
_ANY_NUMBER: Range = (-sys.maxsize, None)


def arrays_by_name(batch: object, names: list[str], file: str) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by the names of the inputs."""
    if isinstance(batch, dict):
        values: dict[Any, Any] = batch
    else:
        items = list(batch) if isinstance(batch, list | tuple) else [batch]
        values = dict(zip(names if len(items) == len(names) else range(len(items)), items, strict=True))
    if set(values) != set(names):
        raise MXError(f"{file}: a batch must hold the inputs {names}, this one holds {list(values)}")
    with user_errors(f"make arrays of {file}"):  # numpy has no bfloat16
        return {name: torch.as_tensor(value).numpy() for name, value in values.items()}


def conform(batch: object, signature: Signature, source: object, note: Callable[[str], None]) -> tuple[tuple, dict]:
    """Return the positional and keyword arguments of a call with a batch.

    `flatten_by_name` matches nested values. Constants may be left out: the example's are used. float64 is cast to the
    example's dtype, with a note to the user.

    Args:
        batch: a tensor, a tuple or list of the inputs in order, or a dict of them by name.
        signature, source, note: of the model; the batch's file; prints a line for the user.
    """
    leaves = []
    for leaf, (name, example, sizes) in zip(_leaves(batch, signature, source), signature.inputs, strict=True):
        if isinstance(leaf, Tensor) and isinstance(example, int | float) and not leaf.dim():
            leaf = leaf.item()
        if isinstance(leaf, Tensor) and isinstance(example, Tensor) and example.is_floating_point():
            if leaf.dtype == torch.float64 != example.dtype:
                note(f"{source}: {name} is cast from float64 to {str(example.dtype).removeprefix('torch.')}")
                leaf = leaf.to(example.dtype)
        try:
            check_leaf(name, leaf, example, sizes)
        except MXError as error:
            raise MXError(f"{source}: {error}") from None
        leaves.append(leaf)
    return signature.unflatten(leaves)


def _leaves(batch: object, signature: Signature, source: object) -> list[object]:
    constants = {name: example for name, example, sizes in signature.inputs if sizes is None}
    trees: dict[str, object] = {name: name for name in signature.names}
    parts: dict[Any, object] = {}
    if isinstance(batch, dict):  # keys may name arguments or single leaves
        trees |= signature.trees
        parts = batch
        contents = str(sorted(map(str, batch)))
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        contents = f"{len(values)} values"
        if any(isinstance(part, dict | list | tuple) for part in values):
            trees = signature.trees
        names = list(trees)
        if len(values) != len(names):
            names = [name for name, tree in trees.items() if not are_all(tree, constants)]
        if len(values) == len(names):
            parts = dict(zip(names, values, strict=True))
    by_name = dict(constants)
    if parts.keys() <= trees.keys():
        for name, part in parts.items():
            by_name.update(flatten_by_name(part, trees[name], f"{source}: {name}", constants))
        if by_name.keys() == set(signature.names):
            return [by_name[name] for name in signature.names]
    raise MXError(f"{source}: a batch must hold the inputs {signature.names}, this one holds {contents}")


def signature_from_factory(forward: Callable, args: tuple, kwargs: dict, dynamic_shapes: object = None) -> Signature:
    """Return the signature that `torch.export.export(module, args, kwargs, dynamic_shapes=...)` will have.

    A dimension whose range only the export will find may have any size.
    """
    names = _parameters(forward, len(args))
    trees = [*zip(names, args, strict=True), *kwargs.items()]
    if dynamic_shapes is None or isinstance(dynamic_shapes, dict):
        specs = [(dynamic_shapes or {}).get(name) for name, _ in trees]
    elif isinstance(dynamic_shapes, tuple | list) and len(dynamic_shapes) == len(trees):
        specs = list(dynamic_shapes)
    else:  # another form, or an error that export will report
        specs = [_UNKNOWN] * len(trees)
    leaves: list[str] = []
    ranges: list[list[Range] | None] = []
    for (name, tree), spec in zip(trees, specs, strict=True):
        ranges += _ranges(tree, spec)
        leaves += ["_".join([name, *map(_key, path)]) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    return Signature(args, kwargs, leaves, ranges, names, [], [])


_UNKNOWN = object()


def _parameters(forward: Callable, count: int) -> list[str]:
    """Return the names of the first `count` positional parameters; `args_0` and so on for `*args`, as in torch."""
    names, variadic = [], "args"
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = parameter.name
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    names = names[:count]
    return [*names, *(f"{variadic}_{i}" for i in range(count - len(names)))]


def _ranges(tree: object, spec: object) -> list[list[Range] | None]:
    if isinstance(tree, Tensor):
        if spec is _UNKNOWN:
            return [[(0, None)] * tree.dim()]
        return [[_range(_spec_of(spec, i), size) for i, size in enumerate(tree.shape)]]
    if isinstance(tree, int) and not isinstance(tree, bool) and (spec is _UNKNOWN or _is_dynamic(spec)):
        return [[_ANY_NUMBER]]
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = [(value, _spec_of(spec, key)) for key, value in items]
    else:  # a constant, or a class that is registered with pytree
        parts = [(leaf, _UNKNOWN) for leaf in pytree.tree_leaves(tree)]
        if len(parts) == 1 and parts[0][0] is tree:
            return [None]
    ranges: list[list[Range] | None] = []
    for part, its_spec in parts:
        ranges += _ranges(part, its_spec)
    return ranges


def _spec_of(spec: object, key: object) -> object:
    """Return the spec of a part: the value at a key or an index."""
    if spec is None or isinstance(spec, dict):
        return (spec or {}).get(key)
    if isinstance(spec, list | tuple) and isinstance(key, int):
        return spec[key] if key < len(spec) else None
    return _UNKNOWN


def _range(dim: object, size: int) -> Range:
    if not _is_dynamic(dim):
        return size, size
    most = getattr(dim, "max", None)
    return getattr(dim, "min", None) or 0, most if isinstance(most, int) and most < sys.maxsize else None


def _is_dynamic(dim: object) -> bool:
    return not (dim is None or isinstance(dim, int) or dim == Dim.STATIC)


def _key(key: object) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
