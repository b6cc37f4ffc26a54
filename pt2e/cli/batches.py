"""Load batches of inputs from files, and bring them into the form that a model takes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Container
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.packages.pytree_args import are_all, check_leaf, flatten_by_name
from pt2mx.pt2e.packages.signature import Signature
from pt2mx.pt2e.user_errors import one_line


def load_batch(file: Path) -> object:
    """Load the batch in a file.

    A `.pt` file holds a tensor, or a tuple or a dict of tensors (numbers, for inputs that are numbers). A `.npz` file
    holds arrays by the names of the inputs, or unnamed in order.

    Raises:
        MXError: for a file that holds no batch.
    """
    try:
        if file.suffix == ".pt":
            return torch.load(file, weights_only=True)
        with np.load(file) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except pickle.UnpicklingError as error:  # its message advises to load the file unsafely
        raise MXError(
            f"{file} is no batch: it holds more than tensors, numbers, lists and dicts, or is damaged"
        ) from error
    except Exception as error:
        raise MXError(f"{file} is no batch: {one_line(error)}") from error
    unnamed = all(re.fullmatch(r"arr_\d+", name) for name in tensors)  # as numpy.savez names them
    return tuple(tensors.values()) if unnamed else tensors


def conform(batch: object, signature: Signature, source: object, note: Callable[[str], None]) -> tuple[tuple, dict]:
    """Return the positional and keyword arguments of a call with a batch.

    `flatten_by_name` matches nested values. Constants may be left out: the example's are used. float64 is cast to the
    example's dtype, with a note to the user.

    Args:
        batch: a tensor, a tuple or list of the inputs in order, or a dict of them by name.
        signature: the signature of the model.
        source: the batch's file, for errors and notes.
        note: prints a line for the user.

    Raises:
        MXError: for a batch that the model does not take; it names the source and the input.
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
    """Return the leaves of the arguments that a batch describes."""
    constants = {name: example for name, example, sizes in signature.inputs if sizes is None}
    parts, trees = _by_key(batch, signature) if isinstance(batch, dict) else _in_order(batch, signature, constants)
    by_name = dict(constants)
    if parts.keys() <= trees.keys():
        for name, part in parts.items():
            by_name.update(flatten_by_name(part, trees[name], f"{source}: {name}", constants))
        if by_name.keys() == set(signature.names):
            return [by_name[name] for name in signature.names]
    contents = sorted(map(str, batch)) if isinstance(batch, dict) else f"{len(_values(batch))} values"
    raise MXError(f"{source}: a batch must hold the inputs {signature.names}, this one holds {contents}")


def _by_key(batch: dict, signature: Signature) -> tuple[dict, dict[str, object]]:
    """Return a batch, and the names of leaves by key: keys may name arguments or single leaves."""
    return batch, {**_leaf_trees(signature), **signature.trees}


def _in_order(batch: object, signature: Signature, constants: Container[str]) -> tuple[dict, dict[str, object]]:
    """Return the values of a batch by argument, and the names of the leaves of each argument.

    Without nesting each leaf counts as an argument. Returns no values where their number fits neither all arguments nor
    those that vary."""
    values = _values(batch)
    nested = any(isinstance(part, dict | list | tuple) for part in values)
    trees = signature.trees if nested else _leaf_trees(signature)
    varying = [name for name, tree in trees.items() if not are_all(tree, constants)]
    names = list(trees) if len(values) == len(trees) else varying
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}, trees


def _values(batch: object) -> list[object]:
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def _leaf_trees(signature: Signature) -> dict[str, object]:
    """Return `Signature.trees` with each leaf as an argument of its own."""
    return {name: name for name in signature.names}
