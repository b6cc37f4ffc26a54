"""Find the dimensions that a matmul reduces, where the arguments of the call determine them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from pt2mx.fx.graph.node import args_of

Axes = tuple[int, int]


def vecdot_axes(node: Node) -> Axes:
    """linalg_vecdot(x, y, *, dim=-1)."""
    dim: Any = node.kwargs.get("dim", -1)
    return dim, dim


def tensordot_axes(node: Node) -> Axes | None:
    """tensordot(x, y, dims_x, dims_y): the last pair of reduced dimensions; None for an outer product."""
    dims_x, dims_y = args_of(node)[2:4]
    return (dims_x[-1], dims_y[-1]) if dims_x else None


def einsum_axes(node: Node) -> Axes | None:
    """einsum(equation, [x, y]): of the labels that it reduces the last in x, the one closest in memory.

    None where it is no matmul of two tensors, reduces no label of both, or takes a diagonal of one.
    """
    equation, tensors = args_of(node)[:2]
    terms, arrow, output = equation.replace(" ", "").partition("->")
    terms = terms.split(",")
    labels = [term.replace(".", "") for term in terms]
    if len(tensors) != 2 or any(len(set(term)) < len(term) for term in labels):
        return None
    if arrow:
        reduced = [label for label in labels[0] if label in labels[1] and label not in output]
    else:  # shared labels are reduced
        reduced = [label for label in labels[0] if label in labels[1]]
    return (_axis(terms[0], reduced[-1]), _axis(terms[1], reduced[-1])) if reduced else None


def einsum_free_axis(node: Node, item: int) -> int | None:
    """Return the last dimension of an einsum's factor that the other factor lacks; None if there is none."""
    terms = args_of(node)[0].replace(" ", "").partition("->")[0].split(",")
    term, other = terms[item], terms[1 - item]
    free = [label for label in term.replace(".", "") if label not in other]
    return _axis(term, free[-1]) if free else None


def _axis(term: str, label: str) -> int:
    """Return the dimension of a label, counted from the end if it follows an ellipsis, else from the front."""
    head, _, tail = term.partition("...")
    return tail.index(label) - len(tail) if label in tail else head.index(label)
