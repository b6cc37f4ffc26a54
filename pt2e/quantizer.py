"""`MXQuantizer`: which operators of a graph get which MX specs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.aliasing import is_written, written_roots
from pt2mx.fx.arguments import make_positional
from pt2mx.fx.constants import constant_nodes
from pt2mx.fx.module_stack import modules_of
from pt2mx.fx.subgraphs import graph_modules, nodes_in_order, place_inner_graphs
from pt2mx.pt2e import recipe
from pt2mx.pt2e.annotate import REASON_KEY, Plan, annotate_operator, plan_operator
from pt2mx.pt2e.config import MXQuantizationConfig
from pt2mx.pt2e.machinery import Q_ANNOTATION_KEY, Quantizer
from pt2mx.pt2e.matching import MATCHERS
from pt2mx.pt2e.operators import (
    OPERANDS,
    OPT_IN,
    argument_of,
    names_of,
    operands_of,
    quantizable_operators,
    replace_argument,
)

Config = MXQuantizationConfig | None


class MXQuantizer(Quantizer):
    """Annotates an exported graph with MX specs.

    Each setter takes a config, or None for "leave in high precision", and returns the quantizer. Where several settings
    match an operator, the first of these wins: filter function, first and last, exact module name, module name pattern
    (in the order in which they were set), module type, operator, global. Of nested modules the innermost wins.

    It works with `pt2mx.prepare_pt2e` as with torchao's own, and inside torchao's `ComposableQuantizer`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._filter: Callable[[Node], bool] | None = None
        self._global: Config = None
        #: "first" or "last" -> count -> config
        self._ends: dict[str, dict[int, Config]] = {kind: {} for kind in recipe.ENDS}
        #: setting kind -> key -> config, in order of precedence
        self._settings: dict[str, dict[str, Config]] = {kind: {} for kind in MATCHERS}

    def set_global(self, config: Config) -> MXQuantizer:
        """For every operator that no other setting matches."""
        self._global = _checked(config)
        return self

    def set_first(self, config: Config, count: int = 1) -> MXQuantizer:
        """For the first `count` operators, in the order of execution, that the other settings quantize. Where several
        counts were set, the smallest that covers an operator wins."""
        return self._set_end("first", count, config)

    def set_last(self, config: Config, count: int = 1) -> MXQuantizer:
        """For the last `count` operators that the other settings quantize, as `set_first` has it."""
        return self._set_end("last", count, config)

    def set_module_name(self, name: str, config: Config) -> MXQuantizer:
        """For the operators inside the module of this qualified name, such as "encoder.layer.0.q_proj"."""
        return self._set("module_name", name, config)

    def set_module_name_regex(self, pattern: str, config: Config) -> MXQuantizer:
        """For the operators inside the modules whose whole qualified name the pattern matches."""
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise MXError(f"{pattern!r} is no regular expression: {error}") from None
        return self._set("module_name_regex", pattern, config)

    def set_module_type(self, module_type: type | str, config: Config) -> MXQuantizer:
        """For the operators inside modules of this class: the class, its qualified name, or its bare name."""
        if isinstance(module_type, type):
            module_type = f"{module_type.__module__}.{module_type.__qualname__}"
        return self._set("module_type", module_type, config)

    def set_operator_type(self, operator: torch._ops.OpOverload | str, config: Config) -> MXQuantizer:
        """For one operator with its overloads, or for one overload: `torch.ops.aten.bmm.default`, `torch.ops.aten.bmm`
        or "aten.bmm". Elementwise `aten.add` and `aten.mul` are quantized only where this names them.
        """
        name = str(operator).removeprefix("torch.ops.").removesuffix(".default")
        allowed = {name for overload in (*OPERANDS, *OPT_IN) for name in names_of(overload)}
        if name not in allowed:
            raise MXError(f"operator {name!r} cannot be quantized: {nearest(name, sorted(allowed))}")
        return self._set("operator_type", name, config)

    def set_filter_function(self, function: Callable[[Node], bool] | None) -> MXQuantizer:
        """Only operators for whose node `function(node)` is true are quantized; None takes the filter away."""
        if function is not None and not callable(function):
            raise MXError(f"the filter must be a function of a node that returns a bool, not {function!r}")
        self._filter = function
        return self

    @classmethod
    def from_recipe(cls, path_or_name: object) -> MXQuantizer:
        """The quantizer that a YAML recipe describes: a path, or the name of one of `pt2mx.configs`."""
        quantizer = cls()
        for kind, key, config in recipe.read(path_or_name):
            setter = getattr(quantizer, f"set_{kind}")
            try:
                if kind in recipe.ENDS:
                    setter(config, key)
                else:
                    setter(*([key] if key is not None else []), config)
            except MXError as error:
                raise MXError(f"recipe {path_or_name}: {error}") from None
        return quantizer

    def to_recipe(self, path: object = None) -> str:
        """The YAML recipe of this quantizer, also written to `path` if one is given."""
        if self._filter is not None:
            raise MXError("a filter function cannot be written to a recipe: use module names or patterns instead")
        settings = [("global", None, self._global)] if self._global is not None else []
        kinds = {**self._ends, **self._settings}
        settings += [(kind, key, config) for kind, keys in kinds.items() for key, config in keys.items()]
        return recipe.write(settings, path)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Give each quantized operand an edge of its own, at its consumer.

        torchao keys annotations by (producer, consumer) and reads positional arguments only: `x @ x` would get one
        spec. It observes a tensor where it is produced: what the graph writes to it later (`x[:, 0] = 5`) would be
        lost.
        """
        for graph in graph_modules(model):
            self._give_edges(graph)
        return model

    def _give_edges(self, model: GraphModule) -> None:
        roots = written_roots(model.graph)
        for node in self._candidates(model):
            make_positional(node)
            read = _arguments(node)
            for operand in operands_of(node):
                argument = argument_of(node, operand)
                if argument is not None and (read.count(argument) > 1 or is_written(argument, roots)):
                    with model.graph.inserting_before(node):
                        alias = model.graph.call_function(torch.ops.aten.alias.default, (argument,))
                    alias.meta.update({k: v for k, v in argument.meta.items() if k != Q_ANNOTATION_KEY})
                    replace_argument(node, operand, alias)
        model.recompile()

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every quantizable operator that a setting selects, in graphs inside the model's too; another
        quantizer's annotations stay."""
        matched: set[tuple[str, object]] = set()
        place_inner_graphs(model)
        graphs = graph_modules(model)
        candidates = [node for graph in graphs for node in self._candidates(graph)]
        constants = set().union(*(constant_nodes(graph.graph) for graph in graphs))
        chosen: dict[Node, MXQuantizationConfig] = {}
        plans: dict[Node, Plan] = {}
        for node in candidates:
            if Q_ANNOTATION_KEY in node.meta:
                node.meta[REASON_KEY] = "annotated by another quantizer"
                continue
            config, reason = self._config_of(node, matched)
            if config is None:
                node.meta[REASON_KEY] = reason
            else:
                chosen[node], plans[node] = config, plan_operator(node, config, constants)
        for node, (source, config) in self._at_the_ends([n for n in nodes_in_order(model) if plans.get(n)]).items():
            matched.add(source)
            if config is None:
                node.meta[REASON_KEY] = f"excluded by {source[0]} {source[1]}"
                del plans[node]
            else:
                chosen[node], plans[node] = config, plan_operator(node, config, constants)
        for node, plan in plans.items():
            annotate_operator(plan, chosen[node])
        self._warn_unmatched(candidates, matched)
        _warn_unknown_operands(chosen)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing is left to check: `annotate` makes annotations that are valid."""

    def _set(self, kind: str, key: str, config: Config) -> MXQuantizer:
        if not isinstance(key, str) or not key:
            raise MXError(f"{kind} must be a string that is not empty, not {key!r}")
        self._settings[kind][key] = _checked(config)
        return self

    def _set_end(self, kind: str, count: int, config: Config) -> MXQuantizer:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise MXError(f"{kind}: count={count!r} must be an integer of at least 1")
        self._ends[kind][count] = _checked(config)
        return self

    def _candidates(self, model: GraphModule) -> list[Node]:
        asked_for = self._settings["operator_type"].keys()
        return quantizable_operators(model.graph, lambda name: not asked_for.isdisjoint(names_of(name)))

    def _at_the_ends(self, nodes: list[Node]) -> dict[Node, tuple[tuple[str, int], Config]]:
        """What `set_first` and `set_last` say of the quantized operators, in the order of execution, some more than
        once, with the setting that says it."""
        found: dict[Node, tuple[tuple[str, int], Config]] = {}
        for kind, ordered in (("first", nodes), ("last", nodes[::-1])):
            for count, config in sorted(self._ends[kind].items()):
                for node in list(dict.fromkeys(ordered))[:count]:
                    found.setdefault(node, ((kind, count), config))
        return found

    def _config_of(self, node: Node, matched: set[tuple[str, object]]) -> tuple[Config, str]:
        """The config of an operator, and the reason if it is None. Notes every setting that matches in `matched`."""
        found: list[tuple[str, Config]] = []
        for kind, matches in MATCHERS.items():
            hits = [key for key in self._settings[kind] if matches(key, node) >= 0]
            matched.update((kind, key) for key in hits)
            if hits:
                innermost = max(hits, key=lambda key: matches(key, node))
                found.append((f"{kind} {innermost!r}", self._settings[kind][innermost]))
        if self._filter is not None and not self._filter(node):
            return None, "excluded by the filter function"
        source, config = found[0] if found else ("the global setting", self._global)
        return config, "no setting matches it" if not found and config is None else f"excluded by {source}"

    def _warn_unmatched(self, candidates: list[Node], matched: set[tuple[str, object]]) -> None:
        names = {name for node in candidates for name, _ in modules_of(node) if name}
        types = {kind.rpartition(".")[2] for node in candidates for _, kind in modules_of(node)}
        known = {"module_name": names, "module_name_regex": names, "module_type": types}
        for kind, keys in {**self._ends, **self._settings}.items():
            for key in keys:
                if (kind, key) not in matched:
                    near = nearest(key, sorted(known[kind])).split(" allowed:")[0] if kind in known else ""
                    hint = f"; {near}" if near.startswith("did") else ""
                    warnings.warn(f"the setting {kind} {key!r} matches no operator of the model{hint}", stacklevel=3)


def _warn_unknown_operands(chosen: dict[Node, MXQuantizationConfig]) -> None:
    known: dict[MXQuantizationConfig, set[str]] = {}
    for node, config in chosen.items():
        known.setdefault(config, set()).update(operand.name for operand in operands_of(node))
    for config, names in known.items():
        for name, _ in config.operands:
            if name not in names:
                warnings.warn(
                    f"none of the operators whose config names the operand {name!r} has one; they have "
                    + ", ".join(sorted(names)),
                    stacklevel=3,
                )


def _checked(config: Config) -> Config:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(
            f"expected an MXQuantizationConfig or None, not {config!r}: make one with "
            "get_default_mx_quantization_config(...)"
        )
    return config


def _arguments(node: Node) -> list[Node]:
    """The nodes that a call reads, as often as it does."""
    read: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), read.append)
    return read
