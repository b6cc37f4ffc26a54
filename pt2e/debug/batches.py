"""Batches of inputs: each is a tensor, a tuple of positional arguments or a dict of keyword arguments of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.analysis.agreement import tensors_in
from pt2mx.errors import MXError
from pt2mx.fx.graph.node import value_of
from pt2mx.pt2e.files.user_errors import one_line


def several(batches: object, name: str = "batches") -> Iterable[Any]:
    """Return the batches; a single one is an MXError, since a tensor could be iterated over its rows."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise MXError(f"{name} is one of type {type(batches).__name__}: give a list of batches")
    return batches


def leaves_of(model: GraphModule, batch: Any) -> list[Any]:
    """Return the values of a batch for the placeholders of a graph."""
    return pytree.tree_leaves(arguments_of(model, batch))


def named_leaves(model: GraphModule, batch: Any) -> dict[str, Any]:
    """Return `leaves_of` by the names of the placeholders."""
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    return dict(zip(names, leaves_of(model, batch), strict=True))


def arguments_of(model: GraphModule, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call, as the graph was exported.

    Raises:
        MXError: for another number of arguments, other names or other objects than the model takes.
    """
    info = getattr(model.graph._codegen, "pytree_info", None)
    if info is None:
        names = positional = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    else:
        names = [name for name in info.orig_args if name != "self"]
        positional = names[: info.in_spec.child(0).num_children]
    if isinstance(batch, Mapping):  # a tokenizer's output is a mapping, but no dict
        named = dict(batch)
    else:
        values = batch if isinstance(batch, tuple | list) else (batch,)
        named = dict(zip(names, values, strict=False)) if len(values) <= len(names) else {}
    if set(named) != set(names):
        raise MXError(f"the model takes {', '.join(names)}: give each of them once, not {_described(batch)}")
    arguments = [named[name] for name in positional], {name: named[name] for name in names[len(positional) :]}
    _check_leaves(model, pytree.tree_leaves(arguments))
    return arguments


def _check_leaves(model: GraphModule, leaves: list[Any]) -> None:
    inputs = model.graph.find_nodes(op="placeholder")
    if len(leaves) != len(inputs):
        raise MXError(f"the model takes {len(inputs)} tensors and numbers, and a batch holds {len(leaves)}")
    for node, leaf in zip(inputs, leaves, strict=True):
        if isinstance(value_of(node), Tensor) and not isinstance(leaf, Tensor):
            raise MXError(f"the model takes a tensor as {node.target}, and a batch holds a {type(leaf).__name__}")


def check_values(batch: Any) -> None:
    """Raise an MXError for a batch whose tensors are empty."""
    tensors = tensors_in(batch)
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise MXError("the inputs of a batch are without values: there is nothing to compare")


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(map(str, batch)) or "none"
    return f"{len(batch)} values" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"


def copied(tree: Any) -> Any:
    """Return a tree with copies of its tensors, for a model that may write to its inputs."""
    return pytree.tree_map_only(Tensor, Tensor.clone, tree)


def call(model: GraphModule, batch: Any) -> Any:
    """Call a graph with a copy of a batch."""
    args, kwargs = copied(arguments_of(model, batch))
    with errors_of_running((args, kwargs)):
        return model(*args, **kwargs)


@contextmanager
def errors_of_running(inputs: Any) -> Iterator[None]:
    """Turn an error of the guards of an export, or of an operator, in the block into an MXError."""
    try:
        yield
    except MXError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(inputs))
        raise MXError(f"the model does not run on inputs of shape {shapes}: {one_line(error)}") from error
