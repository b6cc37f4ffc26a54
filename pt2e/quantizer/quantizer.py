"""`MXQuantizer`: annotate a graph with an MX spec for each operand."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import nearest
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.higher_order_ops import graph_modules, nodes_in_order
from pt2mx.fx.graph.node import args_of, called, make_positional, shape_of
from pt2mx.fx.graph.source_node import modules_of, propagate_module_stack
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, Quantizer
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.annotate import REASON_KEY, Plan, annotate_operator, plan_operator
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.graph_patterns import default_exclusion
from pt2mx.pt2e.quantizer.matching import MATCHERS, Context, number_calls
from pt2mx.pt2e.quantizer.operators import (
    CACHE_WRITE,
    argument_of,
    names_of,
    operands_of,
    operator_name,
    quantizable_operators,
    replace_argument,
)
from pt2mx.pt2e.quantizer.settings import Config
from pt2mx.pt2e.quantizer.stored_settings import StoredSettings


class MXQuantizer(StoredSettings, Quantizer):
    """Annotates an exported graph with MX specs.

    Each setter takes a config, or None for "leave in high precision", and returns the quantizer. Where several settings
    match an operator, the first of this list wins: filter function, first and last, one call of a module, exact module
    name, module name pattern (in the order in which they were set), module type, small weights, operator, global. Of
    nested modules the innermost wins.

    It works with `pt2mx.prepare_pt2e`, with torchao's own, and inside torchao's `ComposableQuantizer`.

    Example:
        >>> import torch, pt2mx
        >>> fp8 = pt2mx.get_default_mx_quantization_config(weight="mxfp8", activation="mxfp8")
        >>> quantizer = pt2mx.MXQuantizer().set_global(fp8).set_module_name("1", None)
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).eval()
        >>> prepared = pt2mx.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
        >>> [operator.quantized for operator in pt2mx.quantization_report(prepared).operators]
        [True, False]
    """

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Give each quantized operand its own edge, by an `alias` in front of its consumer where it has none.

        torchao keys annotations by (producer, consumer) and reads positional arguments only, so that `x @ x` would get
        one spec. It observes a tensor where it is produced, and would miss later writes (`x[:, 0] = 5`).

        Args:
            model: the exported graph, which is changed.

        Returns:
            The same graph module.
        """
        for graph in graph_modules(model):
            self._give_edges(graph)
        return model

    def _give_edges(self, model: GraphModule) -> None:
        written, changed = written_nodes(model.graph), False
        for node in self._candidates(model):
            make_positional(node)
            inputs = _arguments(node)
            for operand in operands_of(node):
                argument = argument_of(node, operand)
                if argument is not None and (inputs.count(argument) > 1 or argument in written):
                    with model.graph.inserting_before(node):
                        alias = model.graph.call_function(torch.ops.aten.alias.default, (argument,))
                    alias.meta.update({k: v for k, v in argument.meta.items() if k != Q_ANNOTATION_KEY})
                    replace_argument(node, operand, alias)
                    changed = True
        if changed:
            model.recompile()

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every quantizable operator that a setting selects, also in subgraphs.

        Annotations of another quantizer are kept. A warning names settings that match nothing, or says that there are
        none.

        Args:
            model: the exported graph, whose nodes' meta is changed.

        Returns:
            The same graph module.

        Raises:
            MXError: for an operator that computes in float64.
        """
        matched: set[tuple[str, object]] = set()
        propagate_module_stack(model)
        graphs = graph_modules(model)
        candidates = [node for graph in graphs for node in self._candidates(graph)]
        constants = set().union(*[constant_nodes(graph.graph) for graph in graphs])
        chosen: dict[Node, MXQuantizationConfig] = {}
        plans: dict[Node, Plan] = {}
        calls = number_calls(nodes_in_order(model)) if self._settings[recipe.ORDER] else {}
        context = Context(calls, constants)
        for node in candidates:
            if Q_ANNOTATION_KEY in node.meta:
                node.meta[REASON_KEY] = "annotated by another quantizer"
                continue
            config, reason = self._config_of(node, context, matched)
            if config is None:
                node.meta[REASON_KEY] = reason
            else:
                chosen[node], plans[node] = config, plan_operator(node, config, constants)
        ordered = nodes_in_order(model) if any(self._ends.values()) else ()
        for node, (source, config) in self._at_the_ends(_layers(ordered, plans)).items():
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
        """Do nothing: `annotate` makes valid annotations only."""

    def _candidates(self, model: GraphModule) -> list[Node]:
        requested = set(self._settings["operator_type"]) | ({CACHE_WRITE} if self._kv_cache else set())
        nodes = quantizable_operators(model.graph, lambda name: not requested.isdisjoint(names_of(name)))
        if CACHE_WRITE not in requested:
            return nodes
        return [node for node in nodes if operator_name(called(node)) != CACHE_WRITE or _writes_cache(node)]

    def _at_the_ends(self, nodes: list[Node]) -> dict[Node, tuple[tuple[str, int], Config]]:
        """Return the settings of `set_first` and `set_last` that apply to quantized operators, and their configs.

        Args:
            nodes: the quantized operators in execution order, some more than once.
        """
        settings: dict[Node, tuple[tuple[str, int], Config]] = {}
        for kind, ordered in (("first", nodes), ("last", nodes[::-1])):
            for count, config in sorted(self._ends[kind].items()):
                for node in list(dict.fromkeys(ordered))[:count]:
                    settings.setdefault(node, ((kind, count), config))
        return settings

    def _config_of(self, node: Node, context: Context, matched: set[tuple[str, object]]) -> tuple[Config, str]:
        """Return the config of an operator, and the reason if it is None. Adds matching settings to `matched`."""
        if self._kv_cache is not None and _writes_cache(node):
            matched.add(("kv_cache", None))
            return MXQuantizationConfig(activation=self._kv_cache), ""
        matching: list[tuple[str, Config]] = []
        is_general = True  # only a more specific setting quantizes what the global one would skip
        for kind, matches in MATCHERS.items():
            hits = [key for key in self._settings[kind] if matches(key, node, context) >= 0]
            matched.update((kind, key) for key in hits)
            if hits:
                innermost = max(hits, key=lambda key: matches(key, node, context))
                matching.append((f"{kind} {innermost!r}", self._settings[kind][innermost]))
                is_general &= kind == recipe.SMALL_WEIGHTS
        if self._filter is not None and not self._filter(node):
            return None, "excluded by the filter function"
        is_chosen = matching or self._global is not None
        if is_general and is_chosen and (reason := default_exclusion(node, context.constants)):
            return None, reason
        source, config = matching[0] if matching else ("the global setting", self._global)
        return config, "no setting matches it" if not matching and config is None else f"excluded by {source}"

    def _warn_unmatched(self, candidates: list[Node], matched: set[tuple[str, object]]) -> None:
        if self._global is None and self._kv_cache is None and not self._count():
            warnings.warn(
                "the quantizer has no setting, so that it quantizes nothing: call set_global("
                "get_default_mx_quantization_config()), another setter, or MXQuantizer.from_recipe(name)",
                stacklevel=3,
            )
        if self._kv_cache is not None and ("kv_cache", None) not in matched:
            warnings.warn("kv_cache is set, but the model writes to no cache by aten.index_copy_", stacklevel=3)
        unmatched = [
            (kind, key) for kind, keys in self._by_kind().items() for key in keys if (kind, key) not in matched
        ]
        modules = {module for node in candidates for module in modules_of(node)} if unmatched else set()
        names = {name for name, _ in modules if name}
        known = {
            "module_name": names,
            "module_name_regex": names,
            "module_type": {kind.rpartition(".")[2] for _, kind in modules},
        }
        for kind, key in unmatched:
            near = nearest(key, sorted(known[kind])).split(" allowed:")[0] if kind in known else ""
            hint = f"; {near}" if near.startswith("did") else ""
            warnings.warn(f"the setting {kind} {key!r} matches no operator of the model{hint}", stacklevel=3)


def _warn_unknown_operands(chosen: dict[Node, MXQuantizationConfig]) -> None:
    known: dict[MXQuantizationConfig, set[str]] = {}
    for node, config in chosen.items():
        if config.operands:
            known.setdefault(config, set()).update(operand.name for operand in operands_of(node))
    for config, names in known.items():
        for name, _ in config.operands:
            if name not in names:
                warnings.warn(
                    f"none of the operators whose config names the operand {name!r} has one; they have "
                    + ", ".join(sorted(names)),
                    stacklevel=3,
                )


def _writes_cache(node: Node) -> bool:
    """Return True for a write to a cache of (B, heads, S, width), at positions along S."""
    return operator_name(called(node)) == CACHE_WRITE and args_of(node)[1] == 2 and len(shape_of(node) or ()) == 4


def _layers(nodes: Iterable[Node], plans: dict[Node, Plan]) -> list[Node]:
    """Return the quantized operators except cache writes."""
    return [node for node in nodes if plans.get(node) and not _writes_cache(node)]


def _arguments(node: Node) -> list[Node]:
    """Return the nodes that a call reads, with repetitions."""
    inputs: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), inputs.append)
    return inputs
