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
from pt2mx.fx.subgraphs import graph_modules, place_inner_graphs
from pt2mx.pt2e import recipe
from pt2mx.pt2e.annotate import REASON_KEY, annotate_operator
from pt2mx.pt2e.config import MXQuantizationConfig
from pt2mx.pt2e.machinery import Q_ANNOTATION_KEY, Quantizer
from pt2mx.pt2e.operators import OPERATORS, operand_node, operator_name

Config = MXQuantizationConfig | None


class MXQuantizer(Quantizer):
    """Annotates an exported graph with MX specs.

    Each setter takes a config, or None for "leave in high precision", and returns the quantizer. Where several settings
    match an operator, the first of these wins: filter function, exact module name, module name pattern (in the order in
    which they were set), module type, operator, global. Of nested modules the innermost wins.

    It works with `pt2mx.prepare_pt2e` as with torchao's own, and inside torchao's `ComposableQuantizer`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._filter: Callable[[Node], bool] | None = None
        self._global: Config = None
        #: setting kind -> key -> config, in order of precedence
        self._settings: dict[str, dict[str, Config]] = {kind: {} for kind in _MATCHERS}

    def set_global(self, config: Config) -> MXQuantizer:
        """For every operator that no other setting matches."""
        self._global = _checked(config)
        return self

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
        """For one operator: `torch.ops.aten.bmm.default`, `torch.ops.aten.bmm` or "aten.bmm"."""
        if isinstance(operator, torch._ops.OpOverloadPacket):
            operator = operator.default
        name = operator_name(operator) if isinstance(operator, torch._ops.OpOverload) else str(operator)
        name = name.removeprefix("torch.ops.").removesuffix(".default")
        allowed = [operator_name(target) for target in OPERATORS]
        if name not in allowed:
            raise MXError(f"operator {name!r} cannot be quantized: {nearest(name, allowed)}")
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
            try:
                getattr(quantizer, f"set_{kind}")(*([key] if key is not None else []), config)
            except MXError as error:
                raise MXError(f"recipe {path_or_name}: {error}") from None
        return quantizer

    def to_recipe(self, path: object = None) -> str:
        """The YAML recipe of this quantizer, also written to `path` if one is given."""
        if self._filter is not None:
            raise MXError("a filter function cannot be written to a recipe: use module names or patterns instead")
        settings = [("global", None, self._global)] if self._global is not None else []
        settings += [(kind, key, config) for kind, keys in self._settings.items() for key, config in keys.items()]
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
        for node in _candidates(model):
            make_positional(node)
            seen: set[Node] = set()
            for operand in OPERATORS[node.target]:
                argument = operand_node(node, operand)
                if argument is not None and (argument in seen or is_written(argument, roots)):
                    with model.graph.inserting_before(node):
                        alias = model.graph.call_function(torch.ops.aten.alias.default, (argument,))
                    alias.meta.update({k: v for k, v in argument.meta.items() if k != Q_ANNOTATION_KEY})
                    node.update_arg(operand.position, alias)
                seen.add(argument)
        model.recompile()

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every operator of `OPERATORS` that a setting selects, in graphs inside the model's too; another
        quantizer's annotations stay."""
        matched: set[tuple[str, str]] = set()
        place_inner_graphs(model)
        graphs = graph_modules(model)
        for graph in graphs:
            constants = constant_nodes(graph.graph)
            for node in _candidates(graph):
                if Q_ANNOTATION_KEY in node.meta:
                    node.meta[REASON_KEY] = "annotated by another quantizer"
                    continue
                config, reason = self._config_of(node, matched)
                if config is None:
                    node.meta[REASON_KEY] = reason
                else:
                    annotate_operator(node, config, constants)
        self._warn_unmatched([node for graph in graphs for node in _candidates(graph)], matched)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing is left to check: `annotate` makes annotations that are valid."""

    def _set(self, kind: str, key: str, config: Config) -> MXQuantizer:
        if not isinstance(key, str) or not key:
            raise MXError(f"{kind} must be a string that is not empty, not {key!r}")
        self._settings[kind][key] = _checked(config)
        return self

    def _config_of(self, node: Node, matched: set[tuple[str, str]]) -> tuple[Config, str]:
        """The config of an operator, and the reason if it is None. Notes every setting that matches in `matched`."""
        found: list[tuple[str, Config]] = []
        for kind, matches in _MATCHERS.items():
            hits = [key for key in self._settings[kind] if matches(key, node) >= 0]
            matched.update((kind, key) for key in hits)
            if hits:
                innermost = max(hits, key=lambda key: matches(key, node))
                found.append((f"{kind} {innermost!r}", self._settings[kind][innermost]))
        if self._filter is not None and not self._filter(node):
            return None, "excluded by the filter function"
        source, config = found[0] if found else ("the global setting", self._global)
        return config, "no setting matches it" if not found and config is None else f"excluded by {source}"

    def _warn_unmatched(self, candidates: list[Node], matched: set[tuple[str, str]]) -> None:
        names = {name for node in candidates for name, _ in modules_of(node) if name}
        types = {kind.rpartition(".")[2] for node in candidates for _, kind in modules_of(node)}
        known = {"module_name": names, "module_name_regex": names, "module_type": types}
        for kind, keys in self._settings.items():
            for key in keys:
                if (kind, key) not in matched:
                    near = nearest(key, sorted(known[kind])).split(" allowed:")[0] if kind in known else ""
                    hint = f"; {near}" if near.startswith("did") else ""
                    warnings.warn(f"the setting {kind} {key!r} matches no operator of the model{hint}", stacklevel=3)


def _checked(config: Config) -> Config:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(
            f"expected an MXQuantizationConfig or None, not {config!r}: make one with "
            "get_default_mx_quantization_config(...)"
        )
    return config


def _candidates(model: GraphModule) -> list[Node]:
    return [node for node in model.graph.nodes if node.op == "call_function" and node.target in OPERATORS]


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


#: setting kind, in order of precedence -> how closely around a node a key matches, -1 for not at all
_MATCHERS: dict[str, Callable[[str, Node], int]] = {
    "module_name": lambda key, node: len(key) if _is_inside(key, node) else -1,
    "module_name_regex": lambda key, node: min(0, _depth(node, lambda name, kind: bool(re.fullmatch(key, name)))),
    "module_type": lambda key, node: _depth(node, lambda name, kind: _is_type(key, kind)),
    "operator_type": lambda key, node: 0 if key == operator_name(node.target) else -1,
}
