"""Match settings with a site, and choose the one that decides.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.quantizer.config import Config
from pt2mx.pt2e.quantizer.operators import OPERANDS, OPT_IN, names_of
from pt2mx.pt2e.quantizer.site import Site


@dataclass(frozen=True)
class Choice:
    """The config that settings choose for a site, or the reason why they choose none.

    Args:
        config: None leaves the operator in high precision.
        reason: why the config is None.
        matching: kind and key of the settings that match, also of those that others override.
        is_general: whether the config comes from a setting that does not name the operator. Such a config leaves some
            matmuls in high precision, see `pt2mx.pt2e.quantizer.graph_patterns.default_exclusion`.
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
