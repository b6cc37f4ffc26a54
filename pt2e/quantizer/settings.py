"""Settings and sites: which settings match a call of a quantizable operator, and which of them decides.

A site is one call, as settings see it, wherever it was found. Settings match sites alone. So one recipe means the same
in an exported graph (`sites_of` here), in the modules of a model whose checkpoint is converted
(`pt2mx.pt2e.checkpoints.select_weights`), and in an ONNX file (`pt2mx.pt2e.onnx.quantize.plan`).

Settings are kept by kind and, within a kind, by key. The kinds have this precedence, whatever the order in which they
were set, and within a kind the most specific key decides:

| kind | a key matches | most specific |
|---|---|---|
| one call of a module | a call around the site by caller, type and number | the key set first |
| module name | a module around the site, or a container of one | the longest name |
| module name pattern | the whole name of a module around the site | the key set first |
| module type | the class of a module around the site | of the innermost module |
| small weights | sites whose largest weight has at most so many values | the smallest number |
| operator | the operator, without or with its overload | with the overload |

A key that is set again keeps its place and gets the new config. Around these kinds, `MXQuantizer` asks the format of a
cache, the first and last operators, and the filter function before them, and the global setting after them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.node import called, value_of
from pt2mx.fx.graph.source_node import module_calls
from pt2mx.pt2e.quantizer.config import Config
from pt2mx.pt2e.quantizer.operators import OPERANDS, OPT_IN, names_of, operand_node, operands_of, operator_name

#: a call of a module or operator: the module that makes it, the class or operator, its number among such calls
Call = tuple[str, str, int]


@dataclass(frozen=True)
class Site:
    """One call of a quantizable operator.

    Args:
        operator: the name of the operator, such as "aten.linear".
        path: the names of the modules around the call, outermost first.
        module_types: the qualified names of their classes.
        order: the calls of these modules, and the operator's own call.
        parameters: the number of values of the operator's largest weight; 0 without one.
        call: the call itself, which a filter function gets: a node of a graph or of an ONNX file, or a module.
    """

    operator: str
    path: tuple[str, ...] = ()
    module_types: tuple[str, ...] = ()
    order: tuple[Call, ...] = ()
    parameters: int = 0
    call: object = field(default=None, compare=False)


class CallNumbers:
    """Numbers the calls that modules make, in the order in which it is asked: first come, first numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def order(self, modules: Sequence[tuple[Hashable, str, str]], call: Hashable, operator: str) -> tuple[Call, ...]:
        """Return the numbered calls around an operator, and its own, which the innermost module makes.

        Args:
            modules: (key of the call, name, class) of the modules around it, outermost first. A module's parent by name
                calls it, and nobody calls the root, whose name is "".
            call: the key of the operator's call. A key that comes again keeps its number.
            operator: the name of the operator.
        """
        calls = [self._numbered(key, name.rpartition(".")[0], kind) for key, name, kind in modules if name]
        caller = modules[-1][1] if modules else ""
        return (*calls, self._numbered(call, caller, operator))

    def _numbered(self, key: Hashable, caller: str, kind: str) -> Call:
        if key not in self._numbers:
            self._numbers[key] = self._counts[caller, kind]
            self._counts[caller, kind] += 1
        return caller, kind, self._numbers[key]


def number_calls(nodes: Iterable[Node]) -> dict[Node, tuple[Call, ...]]:
    """Return the numbered calls around every node of a graph.

    Args:
        nodes: all nodes in the order of execution. One that occurs twice counts once.
    """
    numbers = CallNumbers()
    return {node: numbers.order(module_calls(node), node, operator_name(called(node))) for node in nodes}


def sites_of(nodes: Iterable[Node], constants: set[Node], calls: Mapping[Node, tuple[Call, ...]]) -> dict[Node, Site]:
    """Return the sites of the calls of quantizable operators in an exported graph.

    Args:
        nodes: the calls.
        constants: the constant nodes of the graph and its subgraphs.
        calls: as `number_calls` returns them; empty where no setting asks for them.
    """
    sites = {}
    for node in nodes:
        modules = module_calls(node)
        sites[node] = Site(
            operator=operator_name(called(node)),
            path=tuple(name for _, name, _ in modules),
            module_types=tuple(kind for _, _, kind in modules),
            order=calls.get(node, ()),
            parameters=_parameters(node, constants),
            call=node,
        )
    return sites


def _parameters(node: Node, constants: set[Node]) -> int:
    """Return the number of values of the largest weight of an operator; 0 without one."""
    largest = 0
    for operand in operands_of(node):
        weight = operand_node(node, operand) if operand.role in ("weight", "operand") else None
        if weight in constants:
            value = value_of(weight)
            if isinstance(value, torch.Tensor):
                largest = max(largest, value.numel())
    return largest


@dataclass(frozen=True)
class Choice:
    """The config that settings choose for a site, or the reason why they choose none.

    Args:
        config: None leaves the operator in high precision.
        reason: why the config is None.
        matching: kind and key of the settings that match, also of those that others override.
        is_general: whether the config comes from a setting that does not name the operator. Such a config leaves some
            matmuls in high precision, see `pt2mx.pt2e.quantizer.annotate.default_exclusion`.
    """

    config: Config
    reason: str = ""
    matching: tuple[tuple[str, Any], ...] = ()
    is_general: bool = False


def matching_settings(settings: Mapping[str, Mapping[Any, object]], site: Site) -> list[tuple[str, Any]]:
    """Return kind and key of the settings that match a site, the one that decides first.

    Args:
        settings: kind -> key -> config.
        site: the site.
    """
    matching: list[tuple[str, Any]] = []
    for kind, specificity in MATCHERS.items():
        found: dict[Any, int] = {}
        for key in settings[kind]:
            how_specific = specificity(key, site)
            if how_specific is not None:
                found[key] = how_specific
        # the sort is stable: among equals the key that was set first stays first
        matching += [(kind, key) for key in sorted(found, key=lambda key: -found[key])]
    return matching


def _one_call(key: tuple[str, str, int], site: Site) -> int | None:
    caller, kind, number = key
    for call in site.order:
        is_kind = _is_type(kind, call[1]) or kind in names_of(call[1])
        if is_kind and (call[0], call[2]) == (caller, number):
            return 0
    return None


def _module_name(key: str, site: Site) -> int | None:
    """Also match a container that is not called itself, such as a ModuleList."""
    is_inside = any(f"{name}.".startswith(f"{key}.") for name in site.path)
    return len(key) if is_inside else None


def _module_name_regex(key: str, site: Site) -> int | None:
    return 0 if any(re.fullmatch(key, name) for name in site.path) else None


def _module_type(key: str, site: Site) -> int | None:
    depths = [depth for depth, kind in enumerate(site.module_types) if _is_type(key, kind)]
    return max(depths, default=None)


def _is_type(key: str, kind: str) -> bool:
    if key.startswith("torch.nn.") and key.count(".") == 2:  # torch.nn.Linear lives in torch.nn.modules.linear
        return kind.startswith("torch.nn.modules.") and kind.rpartition(".")[2] == key.rpartition(".")[2]
    return kind == key or ("." not in key and kind.rpartition(".")[2] == key)


def _small_weights(key: int, site: Site) -> int | None:
    return -key if 0 < site.parameters <= key else None


def _operator_type(key: str, site: Site) -> int | None:
    names = names_of(site.operator)
    return names.index(key) if key in names else None


#: setting kind, in order of precedence -> how specific a key is for a site, the larger the more; None: no match
MATCHERS: dict[str, Callable[[Any, Site], int | None]] = {
    "module_name_object_type_order": _one_call,
    "module_name": _module_name,
    "module_name_regex": _module_name_regex,
    "module_type": _module_type,
    "small_weights": _small_weights,
    "operator_type": _operator_type,
}


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
    name, allowed = _operator_name(object_type), _operator_names()
    if callable(object_type) and not isinstance(object_type, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = getattr(object_type, "__name__", name)
    for operator in (name, f"aten.{name}"):
        if operator in allowed:
            return "operator_type", operator
    if isinstance(object_type, str) and object_type and not name.startswith("aten."):
        return "module_type", object_type
    raise MXError(
        f"{object_type!r} is neither a class of modules nor an operator that can be quantized: "
        f"{nearest(name, sorted(allowed))}"
    )


def _operator_names() -> set[str]:
    return {name for overload in (*OPERANDS, *OPT_IN) for name in names_of(overload)}


def _operator_name(operator: object) -> str:
    return str(operator).removeprefix("torch.ops.").removesuffix(".default")
