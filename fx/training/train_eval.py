"""Operators that behave differently in training and in evaluation: dropout, batch norm, recurrent networks.

Export writes the mode into the graph as a literal, which `train()` and `eval()` do not change. A prepared model calls
modules in place of such operators, and these follow the mode. Conversion inserts the operators again, in evaluation
mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer

from pt2mx.fx.graph.higher_order_ops import graph_modules, passed_values
from pt2mx.fx.graph.modes import has_effect, mode_of, writes_in_evaluation
from pt2mx.fx.graph.node import (
    OPERATOR_KEY,
    args_of,
    free_name,
    make_positional,
    model_of,
    name_of,
    node_arg,
    operator_of,
    set_value,
)
from pt2mx.fx.graph.tensors import delete_unused_modules, replace_node

aten = torch.ops.aten

#: operators that add to the `num_batches_tracked` of a batch norm, which counts in training only
_COUNTERS = (aten.add_.Tensor, aten.add.Tensor)
#: operators that draw a mask, and that divide it by the probability of its ones: a dropout without an operator of its
#: own (stochastic depth, a decomposed dropout), whose mask is 1 in evaluation
_DRAWS = (aten.bernoulli_.float, aten.bernoulli.p)
_DIVISIONS = (aten.div_.Tensor, aten.div.Tensor, aten.div.Scalar)


def in_backward_pass() -> bool:
    """Return True inside of a backward pass, where the only forward passes are those of activation checkpointing,
    which repeat a pass whose statistics were counted. Compiled code asks when it is compiled: it gets False."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class TrainEvalModule(nn.Module, ABC):
    """A module in a graph that computes `in_training` or `in_evaluation`, by its mode."""

    #: the operator that the module replaces, whose quantized arguments stay the same; None if it replaces none
    operator: OpOverload | None = None
    #: whether it writes an argument in evaluation
    writes_in_evaluation = False

    # subclasses have their own parameters, which graphs pass by position

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.in_training(*args, **kwargs) if self.training else self.in_evaluation(*args, **kwargs)

    @abstractmethod
    def in_training(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the result while the model trains."""

    @abstractmethod
    def in_evaluation(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the result in a converted model, with torch operators alone, because `to_evaluation` records them."""


class TrainEvalOp(TrainEvalModule):
    """An operator, called with all its arguments; the mode decides the argument at `position`.

    Args:
        operator: the operator.
        position: of the argument.
        training, evaluation: its values.
        statistics: positions of the tensors of the model's state that the operator writes in training.
    """

    operator: OpOverload

    def __init__(
        self, operator: OpOverload, position: int, training: object, evaluation: object, statistics: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.operator, self.position, self.values = operator, position, (evaluation, training)
        self.statistics, self.writes_in_evaluation = statistics, writes_in_evaluation(operator)
        self._is_impure = operator._schema.is_mutable  # tells torch.fx that what writes is no dead code

    def in_training(self, *args: Any) -> Tensor:
        if in_backward_pass():  # the pass that this one repeats has written them
            args = tuple(a.clone() if position in self.statistics else a for position, a in enumerate(args))
        return self._call(args, self.values[1])

    def in_evaluation(self, *args: Any) -> Tensor:
        return self._call(args, self.values[0])

    def _call(self, args: tuple[Any, ...], value: object) -> Tensor:
        return self.operator(*args[: self.position], value, *args[self.position + 1 :])


class Counter(TrainEvalOp):
    """The increment of a batch norm's `num_batches_tracked`."""

    def in_evaluation(self, *args: Any) -> Tensor:
        return args[0]


class Mask(TrainEvalOp):
    """The mask of a dropout: (a tensor of its shape, the probability of a one) -> ones divided by it, and zeros."""

    def in_training(self, *args: Any) -> Tensor:
        return self.operator(aten.bernoulli.p(*args), args[1])

    def in_evaluation(self, *args: Any) -> Tensor:
        return aten.ones_like.default(args[0])


def to_train_eval_modules(model: GraphModule) -> list[str]:
    """Make every operator that depends on the mode a `TrainEvalOp`, in subgraphs too, and return the names of those in
    training.

    If the model was exported in training mode, operators that evaluated there (a frozen batch norm) keep evaluating. If
    it was exported in evaluation mode, all of them follow the mode. Changes `model`.
    """
    by_mode = _by_mode(model)
    training = [node.name for node, setting in by_mode.items() if _trains(node, setting)]
    for node in _followers(by_mode):
        position, evaluation, statistics = by_mode[node]
        value = args_of(node)[position] if training else not evaluation
        kind, draw = TrainEvalOp, node
        if node.target in _COUNTERS:
            kind = Counter
        elif node.target in _DIVISIONS:
            kind, draw = Mask, node_arg(node)
        module = kind(operator_of(node), position, value, evaluation, statistics)
        replace_by_module(node, f"{node.name}_by_mode", module, draw.args, node.meta)
        if kind is Mask:
            draw.graph.erase_node(draw)
    for graph in {model_of(node.graph) for node in by_mode}:
        graph.recompile()
    return training


def random_operators(model: GraphModule, trains: bool) -> list[str]:
    """Return the names of the nodes that draw random numbers in both modes.

    In a model exported in training mode (`trains`) such draws usually belong to training (noise). Otherwise only masks
    count, which a decomposed dropout leaves: other models sample on purpose.
    """
    names = []
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            target = node.target
            if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
                continue
            if not mode_of(target) and (trains or "bernoulli" in target._schema.name):
                names.append(node.name)
    return names


def mark_followers(model: GraphModule) -> None:
    """Mark the operators that `to_train_eval_modules` will replace: exported in evaluation, they write nothing (a
    dropout in place), and they may in training. Changes the meta of their nodes."""
    for node in _followers(_by_mode(model)):
        node.meta[OPERATOR_KEY] = node.target


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


def replace_by_module(node: Node, name: str, module: nn.Module, args: tuple[Any, ...], meta: dict[str, Any]) -> Node:
    call = insert_module(node, name, module, args, meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return call


def to_evaluation(model: GraphModule) -> GraphModule:
    """Replace `TrainEvalModule` modules by the operators that they call in evaluation. Changes `model`."""
    module_calls = list(train_eval_modules(model))
    for node, module in module_calls:
        result = _recorded(module, node)
        replace_node(node, result, OPERATOR_KEY)
    if module_calls:
        model.graph.eliminate_dead_code(has_effect)  # what only training reads
        delete_unused_modules(model)
        model.recompile()
    return model


def train_eval_modules(model: GraphModule) -> Iterator[tuple[Node, TrainEvalModule]]:
    for node in model.graph.find_nodes(op="call_module"):
        module = model.get_submodule(name_of(node))
        if isinstance(module, TrainEvalModule):
            yield node, module


def _recorded(module: TrainEvalModule, call: Node) -> Node:
    """Insert the operators that a module calls in evaluation before its call, and return the last one.

    They have their values: an operator of unknown operands may return any of them, so that what writes its result (an
    activation in place) would write its weight.
    """
    tracer, before = GraphAppendingTracer(call.graph), call.prev

    def proxy(argument: Any) -> Any:
        return Proxy(argument, tracer) if isinstance(argument, Node) else argument

    with call.graph.inserting_before(call):
        result: Any = module.in_evaluation(*map_aggregate(call.args, proxy))  # a proxy, since it gets proxies
    node = before.next
    while node is not call:
        set_value(node)
        node = node.next
    return result.node


class _Setting(NamedTuple):
    """The argument that sets the mode of a call, as in `Mode`."""

    position: int
    evaluation: bool | float | None
    statistics: tuple[int, ...]


def _by_mode(model: GraphModule) -> dict[Node, _Setting]:
    passed = passed_values(model)
    settings: dict[Node, _Setting] = {}
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            counts = node.target in _COUNTERS and _counts_batches(model, node, passed)
            setting = _Setting(1, 0, (0,)) if counts else _setting(node)
            if setting is not None:
                settings[node] = setting
    return settings


def _setting(node: Node) -> _Setting | None:
    if node.target in _DIVISIONS:
        return _Setting(1, None, ()) if _is_mask(node) else None
    mode = mode_of(node.target)
    if mode is None:
        return None
    make_positional(node, mode.position + 1)
    if any(node.args[position] is None for position in mode.statistics):
        return None
    return _Setting(mode.position, mode.evaluation, mode.statistics)


def _followers(by_mode: dict[Node, _Setting]) -> list[Node]:
    """Return the calls that will follow the mode, of those that depend on it."""
    training = [node for node, setting in by_mode.items() if _trains(node, setting)]
    if training:
        return training
    # export in evaluation loses the dropout probability of attention
    return [node for node, setting in by_mode.items() if isinstance(setting.evaluation, bool)]


def _trains(node: Node, setting: _Setting) -> bool:
    return args_of(node)[setting.position] != setting.evaluation


def _is_mask(division: Node) -> bool:
    """Return whether a node divides a mask by its probability, and nothing else reads the mask."""
    draw, probability = args_of(division)[:2]
    if not isinstance(draw, Node) or draw.target not in _DRAWS or len(draw.args) != 2:
        return False
    return args_of(draw)[1] == probability and len(draw.users) == len(node_arg(draw).users) == 1


def _counts_batches(model: GraphModule, counter: Node, passed: dict[Node, list[object]]) -> bool:
    """Return whether a node increments the `num_batches_tracked` of modules with a running mean."""
    names = _tensors(counter.args[0], passed)
    for tensor in names:
        path, _, name = tensor.rpartition(".")
        if name != "num_batches_tracked" or not hasattr(model.get_submodule(path), "running_mean"):
            return False
    return bool(names)


def _tensors(value: object, passed: dict[Node, list[object]]) -> set[str]:
    """Return the names of the tensors of a model that a value is, in all calls of its graph, before or after
    increments."""
    if not isinstance(value, Node):
        return set()
    if value.op == "get_attr":
        return {name_of(value)}
    names: set[str] = set()
    for read in value.args[:1] if value.target in _COUNTERS else passed.get(value, []):
        names |= _tensors(read, passed)
    return names
