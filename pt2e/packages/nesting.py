"""Arguments nested as in an example: dicts are matched by their keys, tuples and lists by their order."""

from __future__ import annotations

from collections.abc import Container

from torch.utils import _pytree as pytree

from pt2mx.errors import MXError


def leaves_by_name(given: object, names: object, where: str, optional: Container[str] = ()) -> dict[str, object]:
    """Return the leaves of an argument by their names.

    Args:
        given: the argument.
        names: the names of the leaves, nested as in the example.
        where: what the argument is called in errors.
        optional: the names of leaves that a dict may lack.

    Raises:
        MXError: for an argument nested in another way, or with other keys.
    """
    if isinstance(names, str):
        return {names: given}
    if isinstance(names, dict):
        required = [key for key, part in names.items() if not are_all(part, optional)]
        if not isinstance(given, dict) or not given.keys() <= names.keys() or not given.keys() >= set(required):
            raise MXError(f"{where} must be nested as in the example: a dict of {list(names)}, not {_kind(given)}")
        parts = [(given[key], part, f"{where}[{key!r}]") for key, part in names.items() if key in given]
    elif isinstance(names, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(names):
            raise MXError(f"{where} must be nested as in the example: a list of {len(names)}, not {_kind(given)}")
        parts = [(part, name, f"{where}[{i}]") for i, (part, name) in enumerate(zip(given, names, strict=True))]
    else:  # a class that is registered with pytree
        flat, tree = pytree.tree_flatten(names)
        leaves, found = pytree.tree_flatten(given)
        if tree != found:
            raise MXError(f"{where} must be nested as in the example: {tree}, not {found}")
        return dict(zip(flat, leaves, strict=True))
    return {name: leaf for part in parts for name, leaf in leaves_by_name(*part, optional).items()}


def are_all(names: object, some: Container[str]) -> bool:
    """True if each leaf of a tree of names is one of `some`."""
    return all(name in some for name in pytree.tree_leaves(names))


def _kind(given: object) -> str:
    if isinstance(given, dict):
        return f"a dict of {list(given)}"
    return f"a list of {len(given)}" if isinstance(given, list | tuple) else type(given).__name__
