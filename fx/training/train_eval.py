"""Operators that behave differently in training and in evaluation: dropout, batch norm, recurrent networks.

Export writes the mode into the graph as a literal, which `train()` and `eval()` do not change. A prepared model calls
modules in place of such operators, and these follow the mode. Conversion inserts the operators again, in evaluation
mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer

from pt2mx.fx.graph.node import (
    OPERATOR_KEY,
    args_of,
    free_name,
    make_positional,
    model_of,
    name_of,
    node_arg,
    operator_of,
)
from pt2mx.fx.graph.tensors import delete_unused_modules
from pt2mx.ops.step_variance import in_backward_pass

aten = torch.ops.aten

#: operator -> (position of the literal that sets the mode, its value in evaluation)
_MODES: dict[object, tuple[int, Any]] = {
    aten.dropout.default: (2, False),
    aten.feature_dropout.default: (2, False),
    aten.alpha_dropout.default: (2, False),
    aten.feature_alpha_dropout.default: (2, False),
    aten.native_dropout.default: (2, False),
    aten.rrelu.default: (3, False),
    aten.batch_norm.default: (5, False),
    aten.lstm.input: (6, False),
    aten.gru.input: (6, False),
    aten.rnn_tanh.input: (6, False),
    aten.rnn_relu.input: (6, False),
    # the dropout probability; an export in evaluation mode loses its training value
    aten.scaled_dot_product_attention.default: (4, 0.0),
    # the increment of a batch norm's num_batches_tracked, which counts in training only
    aten.add_.Tensor: (1, 0),
}

#: operator -> positions of the statistics that it writes in training
_WRITTEN: dict[object, tuple[int, ...]] = {aten.batch_norm.default: (3, 4), aten.add_.Tensor: (0,)}


class TrainEvalModule(nn.Module, ABC):
    """A module in a graph that computes `in_training` or `in_evaluation`, by its mode."""

    #: the operator that the module replaces, whose quantized arguments stay the same; None if it replaces none
    operator: OpOverload | None = None

    # subclasses have their own parameters, which graphs pass by position

    def forward(self, *args: Any) -> Tensor:
        return self.in_training(*args) if self.training else self.in_evaluation(*args)

    @abstractmethod
    def in_training(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the result while the model trains."""

    @abstractmethod
    def in_evaluation(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the result in a converted model, with torch operators alone, because `to_evaluation` records them."""


class TrainEvalOp(TrainEvalModule):
    """An operator, called with all its arguments; the mode decides the argument at `position`."""

    operator: OpOverload

    def __init__(self, operator: OpOverload, position: int, training: object, evaluation: object) -> None:
        super().__init__()
        self.operator, self.position, self.values = operator, position, (evaluation, training)
        self._is_impure = operator._schema.is_mutable  # tells torch.fx that a counter is no dead code

    def in_training(self, *args: Any) -> Tensor:
        if in_backward_pass():  # the pass that this one repeats has written them
            written = _WRITTEN.get(self.operator, ())
            args = tuple(a.clone() if position in written else a for position, a in enumerate(args))
        return self._call(args, self.values[1])

    def in_evaluation(self, *args: Any) -> Tensor:
        return args[0] if self._is_impure else self._call(args, self.values[0])  # a counter does not count

    def _call(self, args: tuple[Any, ...], value: object) -> Tensor:
        return self.operator(*args[: self.position], value, *args[self.position + 1 :])


def to_train_eval_modules(graph_modules: list[GraphModule]) -> list[str]:
    """Make every operator that depends on the mode a `TrainEvalOp`, and return the names of those in training.

    If the model was exported in training mode, operators that evaluated there (a frozen batch norm) keep evaluating. If
    it was exported in evaluation mode, all of them follow the mode. Changes the graph modules.
    """
    nodes = [node for m in graph_modules for node in m.graph.nodes if _depends_on_mode(node)]
    training = [_literal(node) != _MODES[node.target][1] for node in nodes]
    for node, trains in zip(nodes, training, strict=True):
        position, evaluation = _MODES[node.target]
        if any(training) and not trains:
            continue
        if not trains and not isinstance(evaluation, bool):
            continue  # the other value is unknown
        value = _literal(node) if trains else not evaluation
        module = TrainEvalOp(operator_of(node), position, value, evaluation)
        replace_by_module(node, f"{node.name}_by_mode", module, node.args, node.meta)
    for model in {model_of(node.graph) for node in nodes}:
        model.recompile()
    return [node.name for node, trains in zip(nodes, training, strict=True) if trains]


def insert_module(before: Node, name: str, module: nn.Module, args: tuple[Any, ...], meta: dict[str, Any]) -> Node:
    """Add `module` as a submodule named `name`, numbered if needed, and insert a call of it before a node."""
    model = model_of(before.graph)
    unique = free_name(model, name)
    model.add_submodule(unique, module)
    with model.graph.inserting_before(before):
        call = model.graph.call_module(unique, args)
    call.meta.update(meta)
    if isinstance(module, TrainEvalModule) and module.operator is not None:
        call.meta[OPERATOR_KEY] = module.operator
    return call


def replace_by_module(node: Node, name: str, module: nn.Module, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """Replace `node` by a call of `module`."""
    node.replace_all_uses_with(insert_module(node, name, module, args, meta))
    node.graph.erase_node(node)


def to_evaluation(model: GraphModule) -> GraphModule:
    """Replace `TrainEvalModule` modules by the operators that they call in evaluation. Changes `model`."""
    module_calls = list(train_eval_modules(model))
    for node, module in module_calls:
        with model.graph.inserting_before(node):
            result = _recorded(module, node)
        result.meta.update({key: value for key, value in node.meta.items() if key != OPERATOR_KEY})
        node.replace_all_uses_with(result)
        model.graph.erase_node(node)
    if module_calls:
        delete_unused_modules(model)
        model.recompile()
    return model


def train_eval_modules(model: GraphModule) -> Iterator[tuple[Node, TrainEvalModule]]:
    """Yield the calls of `TrainEvalModule` modules in a graph."""
    for node in model.graph.find_nodes(op="call_module"):
        module = model.get_submodule(name_of(node))
        if isinstance(module, TrainEvalModule):
            yield node, module


def _recorded(module: TrainEvalModule, call: Node) -> Node:
    """Insert the operators that a module calls in evaluation into the graph, and return the last one."""
    tracer = GraphAppendingTracer(call.graph)

    def proxy(argument: Any) -> Any:
        return Proxy(argument, tracer) if isinstance(argument, Node) else argument

    result: Any = module.in_evaluation(*map_aggregate(call.args, proxy))  # a proxy, since it gets proxies
    return result.node


def _depends_on_mode(node: Node) -> bool:
    """Return whether an operator is in `_MODES` and depends on the mode."""
    if node.op != "call_function" or node.target not in _MODES:
        return False
    make_positional(node, _MODES[node.target][0] + 1)
    if node.target is aten.add_.Tensor:
        return _counts_batches(node_arg(node))
    # without running statistics a batch norm is the same in both modes
    return node.target is not aten.batch_norm.default or node.args[3] is not None


def _counts_batches(counter: Node) -> bool:
    """Return whether a counter is the `num_batches_tracked` of a module whose running mean a batch norm of the graph
    reads."""
    path, _, attribute = name_of(counter).rpartition(".") if counter.op == "get_attr" else ("", "", "")
    norms = counter.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    means = [args_of(norm)[3] for norm in norms if attribute == "num_batches_tracked"]
    return any(isinstance(m, Node) and m.op == "get_attr" and name_of(m).rpartition(".")[0] == path for m in means)


def _literal(node: Node) -> object:
    """Return the mode that export wrote into a graph."""
    return node.args[_MODES[node.target][0]]
