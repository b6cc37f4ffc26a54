"""Round weights in the order of the graph, each for the inputs that the rounded layers before it give.

Each operator runs on all batches before the next one does, once with float weights and inputs and once with rounded
ones. A weight first moves towards the one that gives the float results for the rounded inputs with least squared error;
GPTQ then rounds it. Sources: GPTAQ (Li et al., arXiv:2504.02692), Qronos (Zhang et al., arXiv:2505.11695).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node

from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.observe.torchao_pt2e import Quantizer
from pt2mx.pt2e.optimize.distributed import Rounded
from pt2mx.pt2e.optimize.matmul_views import Matmul, without_padding
from pt2mx.pt2e.optimize.observers import ROWS, MXHessianObserver, sample
from pt2mx.pt2e.optimize.segments import placeholder_values
from pt2mx.pt2e.optimize.targets import Consumer, WeightTarget, quantized_inputs
from pt2mx.spec import MXSpec

#: added to the diagonal of the sums of products, times its mean, before they are inverted
_DAMPING = 0.01


class _Run(Interpreter):
    """A batch on its way through a graph; `env` holds the values that later operators read.

    Args:
        model: the graph.
        inputs: the value of each placeholder.
        written: the tensors that the graph writes; the run writes into copies.
    """

    def __init__(self, model: GraphModule, inputs: dict[Node, Any], written: Set[Node]) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.written = written
        self.env = {node: self._own(node, value) for node, value in inputs.items()}

    def _own(self, node: Node, value: Any) -> Any:
        return value.clone() if node in self.written and isinstance(value, Tensor) else value

    def value(self, node: Node) -> Any:
        """Return the value of a node that ran, or of a tensor of the model."""
        if node not in self.env:
            self.env[node] = self._own(node, self.run_node(node))
        return self.env[node]

    def step(self, node: Node, changed: dict[Node, Any]) -> None:
        """Run one operator, with other values for some of its inputs."""
        for read in node.all_input_nodes:
            self.value(read)
        kept = {changed_node: self.env[changed_node] for changed_node in changed}
        self.env.update(changed)
        result = self.run_node(node)
        self.env.update(kept)
        self.env[node] = result


@torch.no_grad()
def round_in_order(
    model: GraphModule,
    targets: Sequence[WeightTarget],
    quantizer: Quantizer,
    batches: Sequence[object],
    mask: Node | None,
    correction: float,
    round_weight: Callable[[WeightTarget], Rounded],
) -> dict[Node, Rounded]:
    """Return what `round_weight` gives for each weight, by the node of its target.

    The operators of subgraphs, and weights of several matmuls, are rounded for float inputs.

    Args:
        model: an exported graph, its weights in float; it does not change.
        targets: its weights. Those that are rounded for other inputs get observers of these, and a `goal`.
        quantizer: decides what is quantized, activations included.
        batches: as `pt2mx.optimize` takes them.
        mask: the padding mask of the graph.
        correction: the share of the layers' errors that a weight makes up for, from 0 to 1.
        round_weight: target -> its rounded value, scales and report.
    """
    written = written_nodes(model.graph)
    first_readers: dict[Node, list[WeightTarget]] = defaultdict(list)
    for target in targets:
        readers = {consumer.node for consumer in target.consumers if consumer.node.graph is model.graph}
        if readers:
            first_readers[min(readers)].append(target)
    quantized: dict[Node, dict[Node, MXSpec]] = defaultdict(dict)
    for node, tensor, _, spec in quantized_inputs(model, quantizer):
        if node.graph is model.graph and tensor in node.all_input_nodes:
            quantized[node][tensor] = spec
    exact, rough = [], []
    for inputs in placeholder_values(model, batches):
        exact.append(_Run(model, inputs, written))
        rough.append(_Run(model, inputs, written))
    weights: dict[tuple[Node, Node], Tensor] = {}
    results: dict[Node, Rounded] = {}
    last_readers = {node: max(node.users) for node in model.graph.nodes if node.users}
    statistics = _Statistics(exact, rough, mask, written)
    for node in model.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for target in first_readers.pop(node, ()):
            statistics.give(target, correction)
            results[target.node] = rounded = round_weight(target)
            target.goal = None  # frees its memory
            value = rounded[0]
            for consumer in target.consumers:
                nearest = fake_quantize_mx(target.value.detach(), consumer.spec) if value is None else value
                weights[consumer.node, consumer.weight] = nearest
        for number, (float_run, rough_run) in enumerate(zip(exact, rough, strict=True), 1):
            with user_errors(f"run calibration batch {number}"):
                with torch.random.fork_rng(enabled=_is_random(node)):  # both runs draw the same numbers
                    float_run.step(node, {})
                rough_run.step(node, _quantized(rough_run, node, quantized[node], weights))
            for read in node.all_input_nodes:
                if last_readers[read] is node:
                    del float_run.env[read], rough_run.env[read]
        if not first_readers:
            break
    return results


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _quantized(
    run: _Run, node: Node, specs: dict[Node, MXSpec], weights: dict[tuple[Node, Node], Tensor]
) -> dict[Node, Tensor]:
    """Return the quantized inputs of an operator: rounded weights, and other tensors rounded to nearest."""
    values = {}
    for read, spec in specs.items():
        known = weights.get((node, read))
        values[read] = fake_quantize_mx(run.value(read), spec) if known is None else known
    return values


class _Statistics:
    """The sums of the matmul that was looked at last, which others of the same input share.

    Args:
        exact, rough: the runs of each batch in float and with rounded weights and inputs.
        mask: the padding mask of the graph.
        written: the nodes whose values the graph overwrites, so that two readers may see different ones.
    """

    def __init__(self, exact: Sequence[_Run], rough: Sequence[_Run], mask: Node | None, written: Set[Node]) -> None:
        self.runs, self.mask, self.written = list(zip(exact, rough, strict=True)), mask, written
        self.key: object = None
        self.sums: tuple[MXHessianObserver, list[Tensor]] | None = None

    def give(self, target: WeightTarget, correction: float) -> None:
        """Replace the observer of a weight's input by one of the rounded input, and set its goal."""
        (consumer, *others), matmul = target.consumers, target.consumers[0].matmul
        if others or len(target.inputs) != 1 or matmul is None or matmul.view.experts:
            return
        if self.mask is not None:
            matmul = without_padding(matmul, self.mask)
        view, seen = target.inputs[0]
        read = matmul.source, *matmul.extra_inputs
        owner = None if self.written.isdisjoint(read) else consumer.node
        key = read, matmul.view.rows, consumer.activation, seen.line, seen.block, owner
        if key != self.key:
            self.key, self.sums = key, self._measured(matmul, consumer, seen)
        if self.sums is not None:
            observer, drifts = self.sums
            target.inputs = [(view, observer)]
            target.goal = _goal(target, drifts, correction)

    def _measured(
        self, matmul: Matmul, consumer: Consumer, seen: MXHessianObserver
    ) -> tuple[MXHessianObserver, list[Tensor]] | None:
        """Return the observer of the rounded input, and the sums of products of its columns with those of its error;
        None where rows of the two runs are not the same ones."""
        observer = MXHessianObserver(matmul.view.rows, seen.line, seen.block, seen.columns, seen.home)
        drifts: list[Tensor] = []
        for float_run, rough_run in self.runs:
            value = rough_run.value(matmul.source)
            rounded = value if consumer.activation is None else fake_quantize_mx(value, consumer.activation)
            extra = [rough_run.value(node) for node in matmul.extra_inputs]
            rows = matmul.view.rows(rounded, *extra)
            expected = matmul.view.rows(*(float_run.value(node) for node in (matmul.source, *matmul.extra_inputs)))
            if not isinstance(rows, Tensor) or not isinstance(expected, Tensor) or rows.shape != expected.shape:
                return None
            observer.add(rows)
            _add_drift(drifts, observer, rows, expected)
        return observer, drifts


def _add_drift(drifts: list[Tensor], observer: MXHessianObserver, rows: Tensor, expected: Tensor) -> None:
    """Add `(expected - rows).T @ rows` to the sums, for each part of the columns, (groups, K', K')."""
    if not rows.shape[1]:
        return
    if rows.shape[1] > ROWS:
        some = sample(rows.shape[1], rows.device)
        rows, expected = rows[:, some], expected[:, some]
    widths = [part.shape[1] for part in observer.parts]
    if not drifts:
        drifts += [torch.zeros_like(part) for part in observer.parts]
    rows, expected = rows.float(), expected.float()
    for drift, columns, wanted in zip(drifts, rows.split(widths, 2), expected.split(widths, 2), strict=True):
        drift += ((wanted - columns).mT @ columns).to(drift.device)


def _goal(target: WeightTarget, drifts: list[Tensor], correction: float) -> Tensor | None:
    """Return the weight, moved by the share `correction` towards the one that gives the float results for the rounded
    inputs with least squared error; None where the sums give none."""
    (view, observer), value = target.inputs[0], target.value.detach()
    if not drifts or not all(part.isfinite().all() for part in (*observer.parts, *drifts)):
        return None
    matrices = view.to_matrices(value.float())
    pieces = matrices.split([part.shape[1] for part in observer.parts], 2)
    moved = []
    for part, drift, columns in zip(observer.parts, drifts, pieces, strict=True):
        damped = part.clone()
        diagonal = damped.diagonal(dim1=1, dim2=2)
        diagonal += (_DAMPING * diagonal.mean(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed.any():
            return None
        share = torch.cholesky_solve(drift.mT, lower).mT.to(columns.device)
        moved.append(columns + correction * (columns @ share))
    return view.from_matrices(torch.cat(moved, 2), value.shape)
