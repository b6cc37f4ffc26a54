"""Which settings of a quantizer match an operator."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch.fx import Node

from pt2mx.fx.module_stack import modules_of
from pt2mx.pt2e.operators import names_of, operator_name


def _depth(node: Node, matches: Callable[[str, str], bool]) -> int:
    """Depth of the innermost module around `node` that matches, -1 if none does."""
    return max((i for i, module in enumerate(modules_of(node)) if matches(*module)), default=-1)


def _is_inside(key: str, node: Node) -> bool:
    """Also for a container that is not called itself, such as a ModuleList."""
    return any(f"{name}.".startswith(f"{key}.") for name, _ in modules_of(node))


def _is_type(key: str, kind: str) -> bool:
    if key.startswith("torch.nn.") and key.count(".") == 2:  # torch.nn.Linear lives in torch.nn.modules.linear
        return kind.startswith("torch.nn.modules.") and kind.rpartition(".")[2] == key.rpartition(".")[2]
    return kind == key or ("." not in key and kind.rpartition(".")[2] == key)


def _place(key: str, names: tuple[str, ...]) -> int:
    return names.index(key) if key in names else -1


#: setting kind, in order of precedence -> how closely around a node a key matches, -1 for not at all
MATCHERS: dict[str, Callable[[str, Node], int]] = {
    "module_name": lambda key, node: len(key) if _is_inside(key, node) else -1,
    "module_name_regex": lambda key, node: min(0, _depth(node, lambda name, kind: bool(re.fullmatch(key, name)))),
    "module_type": lambda key, node: _depth(node, lambda name, kind: _is_type(key, kind)),
    "operator_type": lambda key, node: _place(key, names_of(operator_name(node.target))),
}
