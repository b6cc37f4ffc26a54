"""Keys of settings: the operator or class that a key names, and the operators of a graph that it matches."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.node import value_of
from pt2mx.fx.graph.source_node import module_calls, module_name, modules_of
from pt2mx.pt2e.quantizer.operators import OPERANDS, OPT_IN, names_of, operand_node, operands_of, operator_name


def operator_key(operator: object) -> str:
    """Return the name of a quantizable operator: "aten.bmm" for `torch.ops.aten.bmm.default` or that name.

    Raises:
        MXError: for another object, naming the nearest operator.
    """
    name, allowed = _operator_name(operator), _operator_names()
    if name not in allowed:
        raise MXError(f"operator {name!r} cannot be quantized: {nearest(name, sorted(allowed))}")
    return name


def type_key(module_type: type) -> str:
    """Return the qualified name of a class."""
    return f"{module_type.__module__}.{module_type.__qualname__}"


def object_key(object_type: object) -> tuple[str, str]:
    """Return the setting kind and the key that `set_object_type` uses for an object.

    Raises:
        MXError: for an object that is neither an operator nor a class.
    """
    if isinstance(object_type, type):
        return "module_type", type_key(object_type)
    name = _operator_name(object_type)
    if callable(object_type) and not isinstance(object_type, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = getattr(object_type, "__name__", name)
    operator = next((n for n in (name, f"aten.{name}") if n in _operator_names()), None)
    if operator is not None:
        return "operator_type", operator
    if isinstance(object_type, str) and object_type and not name.startswith("aten."):
        return "module_type", object_type
    raise MXError(
        f"{object_type!r} is neither a class of modules nor an operator that can be quantized: "
        f"{nearest(name, sorted(_operator_names()))}"
    )


def _operator_names() -> set[str]:
    return {name for overload in (*OPERANDS, *OPT_IN) for name in names_of(overload)}


def _operator_name(operator: object) -> str:
    return str(operator).removeprefix("torch.ops.").removesuffix(".default")


#: node -> the calls around it and its own: (module that makes the call, class or operator, its number)
Calls = dict[Node, list[tuple[str, str, int]]]


def _depth(node: Node, matches: Callable[[str, str], bool]) -> int:
    """Return the depth of the innermost module around `node` that matches, -1 if none does."""
    return max((i for i, module in enumerate(modules_of(node)) if matches(*module)), default=-1)


def _is_inside(key: str, node: Node) -> bool:
    """Also matches a container that is not called itself, such as a ModuleList."""
    return any(f"{name}.".startswith(f"{key}.") for name, _ in modules_of(node))


def _is_type(key: str, kind: str) -> bool:
    if key.startswith("torch.nn.") and key.count(".") == 2:  # torch.nn.Linear lives in torch.nn.modules.linear
        return kind.startswith("torch.nn.modules.") and kind.rpartition(".")[2] == key.rpartition(".")[2]
    return kind == key or ("." not in key and kind.rpartition(".")[2] == key)


def _position(key: str, names: tuple[str, ...]) -> int:
    return names.index(key) if key in names else -1


def number_calls(nodes: Iterable[Node]) -> Calls:
    """Number the calls around every node, in the order of execution.

    These are the calls of modules, made by the parent by name, and the operator's own call, made by the innermost
    module. A node that occurs twice in `nodes` counts once.
    """
    numbers: dict[object, int] = {}
    counts: Counter[tuple[str, str]] = Counter()

    def numbered(call: object, maker: str, what: str) -> tuple[str, str, int]:
        if call not in numbers:
            numbers[call] = counts[maker, what]
            counts[maker, what] += 1
        return maker, what, numbers[call]

    return {
        node: [
            *(numbered(call, name.rpartition(".")[0], kind) for call, name, kind in module_calls(node) if name),
            numbered(node, module_name(node), operator_name(node.target)),
        ]
        for node in nodes
    }


def _is_call(key: tuple[str, str, int], calls: Iterable[tuple[str, str, int]]) -> bool:
    module, what, index = key
    return any(
        (maker, number) == (module, index) and (_is_type(what, called) or what in names_of(called))
        for maker, called, number in calls
    )


class Context(NamedTuple):
    """The calls around each node, where a setting asks for them, and the constant nodes of all graphs."""

    calls: Calls
    constants: set[Node]


def _weight_values(node: Node, constants: set[Node]) -> int:
    """Return the number of values of the largest weight of an operator; 0 without one."""
    weights = [operand_node(node, operand) for operand in operands_of(node) if operand.role in ("weight", "operand")]
    return max((value_of(one).numel() for one in weights if one in constants), default=0)


#: setting kind, in order of precedence -> depth of the match of a key around a node, -1 for no match
MATCHERS: dict[str, Callable[[Any, Node, Context], int]] = {
    "module_name_object_type_order": lambda key, node, context: 0 if _is_call(key, context.calls.get(node, ())) else -1,
    "module_name": lambda key, node, context: len(key) if _is_inside(key, node) else -1,
    "module_name_regex": lambda key, node, context: min(
        0, _depth(node, lambda name, kind: bool(re.fullmatch(key, name)))
    ),
    "module_type": lambda key, node, context: _depth(node, lambda name, kind: _is_type(key, kind)),
    "small_weights": lambda key, node, context: (
        sys.maxsize - key if 0 < _weight_values(node, context.constants) <= key else -1
    ),
    "operator_type": lambda key, node, context: _position(key, names_of(operator_name(node.target))),
}
