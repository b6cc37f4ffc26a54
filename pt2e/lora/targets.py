"""The linear layers that a user's targets name, as `target_modules` of peft does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from torch.fx import GraphModule

from pt2mx.errors import MXError, listed
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.source_node import modules_of

#: every linear layer with a packed weight
ALL_LINEAR = "all-linear"
#: the ends of the names of classes that adapters are for
_LINEAR = ("Linear", "Conv1D")
#: most names that an error lists
_SHOWN = 6


def targeted(graph: GraphModule, layers: Collection[str], targets: str | Sequence[str]) -> list[str]:
    """Return the modules that targets match, in the order of `layers`, those of linear layers with packed weights.

    Raises:
        MXError: for targets that are no strings, no regular expression, or empty; for one that matches no module, or a
            module that is no linear layer with a packed weight.
    """
    if targets == ALL_LINEAR:
        patterns = {ALL_LINEAR: ".*"}
    elif isinstance(targets, str):
        patterns = {targets: targets}
    elif isinstance(targets, Sequence) and targets and all(isinstance(target, str) and target for target in targets):
        patterns = {target: rf"(.*\.)?{re.escape(target)}" for target in targets}
    else:
        raise MXError(
            f"targets={targets!r} must be {ALL_LINEAR!r}, a regular expression, or a list of names of modules"
        )
    kinds = {name: kind.rpartition(".")[2] for each in graph_modules(graph) for name, kind in _modules_in(each)}
    # routers and others that call the function of a linear layer are no targets of peft
    layers = [name for name in layers if kinds.get(name, _LINEAR[0]).endswith(_LINEAR)]
    if not layers:
        raise MXError("the model has no linear layer with a packed weight: quantize its linear layers")
    matched = {name for target, pattern in patterns.items() for name in _matches(target, pattern, layers, kinds)}
    return [name for name in layers if name in matched]


def _modules_in(graph: GraphModule) -> set[tuple[str, str]]:
    return {module for node in graph.graph.nodes for module in modules_of(node)}


def _matches(target: str, pattern: str, layers: Collection[str], kinds: dict[str, str]) -> list[str]:
    """Return the linear layers that a pattern matches; `kinds`: the class of each module."""
    try:
        names = [name for name in sorted({*layers, *kinds}) if re.fullmatch(pattern, name)]
    except re.error as error:
        raise MXError(f"target {target!r} is no regular expression: {error}") from None
    linear = [name for name in names if name in layers]
    others = {name: kinds[name] for name in names if name not in layers}
    in_float = [name for name, kind in others.items() if kind.endswith(_LINEAR)]
    if in_float and target != ALL_LINEAR:
        named = listed(in_float, _SHOWN)
        raise MXError(f"target {target!r}: {named} has float weights, or is in a subgraph; name others")
    if linear:
        return linear
    if others:
        described = listed([f"{name!r} ({kind})" for name, kind in others.items()], _SHOWN)
        raise MXError(f"target {target!r} is no linear layer, but {described}: name linear layers within")
    near = difflib.get_close_matches(target, {*layers, *(name.rpartition(".")[2] for name in layers)}, _SHOWN, 0)
    raise MXError(f"target {target!r} matches no module; the nearest linear layers are {listed(near, _SHOWN)}")
