"""Second-order estimates of the cost of each operator's error, by backward passes through one run.

An operator's error e in its output moves the model's output by J e. Let H be the metric's curvature there, v a random
direction with E[v v'] = H, and g = J' v, one backward pass. Then (g' e)^2 / 2 has the mean e' J' H J e / 2, which is
the distance that the metric assigns to a small e.

Each candidate's e is the error of its operator alone, run on the float model's inputs. The estimates of the operators
of a module, and of the iterations of a loop, add up. The items of a batch (dimension 0) are independent samples: one
pass gives as many samples as there are items.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.analysis.metrics import METRICS, Metric, outputs_of, own_distance
from pt2mx.errors import MXError
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_tensors
from pt2mx.pt2e.debug.batches import errors_of_running, leaves_of
from pt2mx.pt2e.debug.interpreter import OnValue, Pair, RecordingInterpreter, keyed_nodes, run_against, unchanged
from pt2mx.pt2e.sensitivity.candidates import Candidate, is_quantized

#: module, candidate, operands
Key = tuple[str, str, str]
#: node key -> for each call its gradients, one for each draw; None where no output depends on it
Gradients = Mapping[str, list[list[Tensor | None]]]


def estimates(
    model: GraphModule,
    candidates: dict[str, Candidate],
    operands: tuple[str, ...],
    batch: Any,
    metric: str,
    draws: int,
    seed: Generator,
) -> tuple[dict[Key, float], float]:
    """Return (module, candidate, operands) -> the estimated distance of a batch's outputs, as a sum, and its divisor.

    Each of the `draws` directions is a backward pass.
    """
    probed: set[str] = set()
    for candidate in candidates.values():
        probed |= {key for key, node in keyed_nodes(candidate.model) if _operator(node)}
    values: dict[str, list[Any]] = defaultdict(list)
    probes: dict[str, list[Tensor]] = {}

    def seen(key: str, node: Node, value: Any, interpreter: RecordingInterpreter) -> None:
        values[key].append(value.detach() if isinstance(value, Tensor) else value)

    with torch.enable_grad():
        once = EagerControlFlow(_frozen_copy(model), seen, probed, probes)
        leaves = leaves_of(model, batch)
        with errors_of_running(leaves):
            outputs = outputs_of(once.run(*leaves, enable_io_processing=False))
        own_distance(metric, [pytree.tree_map(Tensor.detach, outputs)])
        drawn = [_gradients(outputs, probes, METRICS[metric], seed) for _ in range(draws)]
    count = sum(METRICS[metric].distance(y.detach(), y.detach())[1] for y in outputs)
    gradients = {key: [list(each) for each in zip(*(one[key] for one in drawn), strict=True)] for key in probes}
    distances: dict[Key, float] = {}
    for name, candidate in candidates.items():
        for (module, which), products in _output_shifts(candidate, operands, batch, values, gradients).items():
            squares = sum(one.square().sum().item() for one in products.values())
            distances[module, name, which] = 0.5 * squares / draws
    return distances, count


def _output_shifts(
    candidate: Candidate,
    operands: tuple[str, ...],
    batch: Any,
    values: Mapping[str, list[Any]],
    gradients: Gradients,
) -> dict[tuple[str, str], dict[int, Tensor]]:
    """Return (module, operands) -> g' e for each draw and item, by the number of items."""
    left_gradients = {key: deque(of_calls) for key, of_calls in gradients.items()}
    moved: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)

    def seen(pair: Pair) -> None:
        drawn = left_gradients[pair.key].popleft() if left_gradients.get(pair.key) else []
        operator = _operator(pair.node)
        if operator is None or all(gradient is None for gradient in drawn):
            return
        module = module_name(operator)
        if module not in candidate.modules:
            return
        for which in operands:
            if not candidate.observers(module, which):
                continue
            with candidate.quantizing({module: which}):
                error = _by_item(pair.recomputed()) - _by_item(pair.want)
            zero = torch.zeros(len(error), dtype=error.dtype, device=error.device)
            terms = [zero if gradient is None else (_by_item(gradient) * error).sum(-1) for gradient in drawn]
            sums = moved[module, which]
            sums[len(error)] = sums.get(len(error), 0) + torch.stack(terms)

    with torch.no_grad(), unchanged(candidate.model):
        run_against(values, candidate.model, batch, seen)
    return moved


def _by_item(value: Tensor) -> Tensor:
    """Return (items, values of each) in float64."""
    return value.double().reshape(len(value), -1) if value.dim() else value.double().reshape(1, 1)


def _operator(node: Node) -> Node | None:
    """Return the quantized operator whose output a node is, or an item of it; None where there is none."""
    for one in [node, *node.all_input_nodes] if node.target is getitem else [node]:
        if is_quantized(one):
            return one
    return None


def _frozen_copy(model: GraphModule) -> GraphModule:
    """Return a copy with its own buffers, which the graph may write, and with parameters that need no gradient."""
    model = copy_sharing_tensors(model)
    map_tensors(model, Tensor.detach)
    return model


def _gradients(
    outputs: list[Tensor], probes: dict[str, list[Tensor]], metric: Metric, seed: Generator
) -> dict[str, list[Tensor | None]]:
    """Return the gradients of the probed values in a random direction, by key; None where no output depends on one."""
    total = torch.stack([(y * metric.direction(y.detach(), seed)).sum() for y in outputs]).sum()
    if not total.requires_grad:
        return {key: [None] * len(of_calls) for key, of_calls in probes.items()}
    gradients: dict[str, list[Tensor | None]] = {}
    flat = list(itertools.chain.from_iterable(probes.values()))
    each = iter(torch.autograd.grad(total, flat, allow_unused=True, retain_graph=True))
    for key, of_calls in probes.items():
        gradients[key] = list(itertools.islice(each, len(of_calls)))
    return gradients


def _cond(chosen: Any, true: Any, false: Any, operands: Sequence[Any]) -> Any:
    return (true if chosen else false)(*operands)


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], fixed: Sequence[Any]) -> Any:
    while condition(*carried, *fixed):
        carried = body(*carried, *fixed)
    return tuple(carried)


def _scan(step: Any, carried: Sequence[Any], slices: Sequence[Tensor], fixed: Sequence[Any]) -> Any:
    made = []
    for each in zip(*slices, strict=True):
        results = step(*carried, *each, *fixed)
        carried = results[: len(carried)]
        made.append(results[len(carried) :])
    return (*carried, *map(torch.stack, zip(*made, strict=True)))


def _map(each: Any, slices: Sequence[Tensor], fixed: Sequence[Any]) -> Any:
    made = [each(*one, *fixed) for one in zip(*slices, strict=True)]
    return tuple(map(torch.stack, zip(*made, strict=True)))


def _autocast(device: str, dtype: Any, enabled: bool, cache_enabled: bool, graph: Any, *operands: Any) -> Any:
    with torch.autocast(device, dtype, enabled, cache_enabled):
        return graph(*operands)


#: higher-order operator -> the function that runs its subgraphs
_RUN: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "wrap_with_autocast": _autocast,
    "wrap_with_set_grad_enabled": lambda enabled, graph, *operands: graph(*operands),
    "tag_activation_checkpoint": lambda graph, *operands, **options: graph(*operands),
    "hints_wrapper": lambda graph, operands, options, **hints: graph(*operands),
    "invoke_subgraph": lambda graph, name, *operands: graph(*operands),
}


class EagerControlFlow(RecordingInterpreter):
    """A run that adds a zero to each probed value: the zero has the gradient of the value.

    Args:
        probed: the keys of these values.
        probes: collects the zeros, by key, in the order of the calls.
    """

    def __init__(
        self, model: GraphModule, on_value: OnValue, probed: set[str], probes: dict[str, list[Tensor]], path: str = ""
    ) -> None:
        super().__init__(model, on_value, path)
        self.probed, self.probes = probed, probes

    def of_subgraph(self, subgraph: GraphModule, path: str) -> RecordingInterpreter:
        """Return the interpreter of a subgraph."""
        return EagerControlFlow(subgraph, self.on_value, self.probed, self.probes, path)

    def computed(self, node: Node) -> Any:
        """Return the value of a node, plus a zero if it is probed."""
        value = super().computed(node)
        key = self.keys.get(node)
        if key in self.probed and isinstance(value, Tensor) and value.is_floating_point():
            self.probes.setdefault(key, []).append(torch.zeros_like(value, requires_grad=True))
            return value + self.probes[key][-1]
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; execute conditions and loops in Python."""
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        if target.name() not in _RUN:
            raise MXError(f"no gradients pass through {target.name()}: give method='forward'")
        return _RUN[target.name()](*args, **kwargs)
