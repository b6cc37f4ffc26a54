"""Learn the rounding of a graph's weights, segment by segment, against the outputs of the float segment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from pt2mx import ops
from pt2mx.algorithms.block_scales import BlockScales, nearest_scales
from pt2mx.algorithms.learned_rounding import LatentWeight
from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import FakeQuantize, tensor_of
from pt2mx.pt2e.observe.torchao_pt2e import Quantizer
from pt2mx.pt2e.optimize.losses import LOSS_SCALE, check_batches, hold_out, relative_error
from pt2mx.pt2e.optimize.packed_weights import shared_tensor_scale
from pt2mx.pt2e.optimize.segments import ModuleBlock, module_blocks, placeholder_values
from pt2mx.pt2e.optimize.targets import WeightTarget, quantized_inputs, reason_not_rounded, set_weight, weight_targets
from pt2mx.spec import MXSpec

#: evaluations on the held-out batches, and how many in a row may show no improvement before training stops
_EVALUATIONS, _PATIENCE = 10, 5

#: operator, quantized tensor, spec
_Quantized = tuple[Node, Node, MXSpec]


@dataclass(frozen=True)
class LearnedBlock:
    """A segment whose weights were rounded anew.

    Args:
        name: the name of its repeated module, such as "encoder.layer.3"; "" between repeated modules.
        weights: the names of the weights.
        before, after: the squared error of its outputs over their squared value, on the held-out batches.
    """

    name: str
    weights: tuple[str, ...]
    before: float
    after: float


def learn_rounding(
    model: GraphModule,
    original: GraphModule,
    quantizer: Quantizer,
    batches: Sequence[object],
    *,
    steps: int = 200,
    lr: float | None = None,
    seed: int = 0,
    progress: bool = False,
    scales: dict[Node, BlockScales] | None = None,
) -> list[LearnedBlock]:
    """Learn better roundings by signed gradient descent (Cheng et al., arXiv:2309.05516), starting from the current
    ones.

    Each segment is trained on its float inputs and compared with its float outputs. The step with the best outputs on
    the held-out batches is kept, possibly the start.

    Args:
        model: an exported graph, its weights rounded or not. It is changed.
        original: the same graph with float weights.
        quantizer: decides what is quantized, activations included.
        batches: as `pt2mx.optimize` takes them. One of eight is held out; a single one is not.
        steps: maximum number of steps per segment, each on one batch.
        lr: size of the first step, in units of the distance between neighbouring values of the format; it decays to
            zero. None: 1 / steps, which moves a value by at most half a distance in total.
        seed: seed for the choice of held-out batches, and the order of the others.
        progress: True shows a bar with the name of each segment.
        scales: the scales of rounded weights that do not follow from their values, by the first consumer. It gets those
            of the weights that change; needed for formats whose scales have a significand.

    Returns:
        The segments that have changed. A weight does not change if several segments use it, if no known matmul uses it,
        or if its segment uses memory that the graph writes.

    Raises:
        MXError: without batches, and for steps or a rate that are not positive.
    """
    check_batches(batches)
    if steps < 1 or not (lr is None or lr > 0):
        raise MXError(f"learned rounding takes steps and a rate above 0, not steps={steps} and lr={lr}")
    generator = torch.Generator().manual_seed(seed)
    train, held_out = hold_out(len(batches), generator)
    blocks, targets, written = module_blocks(model), weight_targets(model, quantizer), written_nodes(model.graph)
    float_blocks = module_blocks(original)
    originals = [(consumer, target) for target in weight_targets(original, quantizer) for consumer in target.consumers]
    floats = {
        consumer.node.name: target.value for consumer, target in originals if consumer.node.graph is original.graph
    }
    quantized = [(node, tensor, spec) for node, tensor, _, spec in quantized_inputs(model, quantizer)]
    memory = {node: tensor_of(model, node) for node in model.graph.find_nodes(op="get_attr") if node in written}
    values = [
        {**placeholder_values(model, batch), **{node: tensor.clone() for node, tensor in memory.items()}}
        for batch in batches
    ]
    learned = []
    with tqdm(blocks, disable=not progress, file=sys.stderr) as bar:
        for i, block in enumerate(bar):
            bar.set_postfix_str(block.name)
            nodes = set(block.nodes)
            used = [target for target in targets if any(consumer.node in nodes for consumer in target.consumers)]
            inputs = [[known[node] for node in block.inputs] for known in values]
            with torch.no_grad():
                float_block, _ = float_blocks[i].copy(original)
                references = [float_block(*arguments) for arguments in inputs]
            chosen = [] if nodes & written else [target for target in used if _is_learnable(target, nodes)]
            if chosen:
                run = _with_weights(model, block, chosen, [q for q in quantized if q[0] in nodes])
                known = [_scales_of(target, scales or {}) for target in chosen]
                weights = [
                    _latent(target, floats[_consumer_in(target, nodes)].detach(), one)
                    for target, one in zip(chosen, known, strict=True)
                ]
                training = _Training(
                    run, weights, [target.value.dtype for target in chosen], inputs, references, held_out
                )
                before, after, best = training.run(_order(train, generator), steps, lr or 1 / steps)
                if best:
                    for target, value, one in zip(chosen, best, known, strict=True):
                        set_weight(model, target, value)
                        if one is not None and scales is not None:
                            scales[target.consumers[0].node] = one
                    learned.append(LearnedBlock(block.name, tuple(target.name for target in chosen), before, after))
            _advance(values, block, references, blocks[i + 1 :])
    model.recompile()
    return learned


def _advance(values: list[dict[Node, Any]], block: ModuleBlock, outputs: list[Any], later: list[ModuleBlock]) -> None:
    """Add the outputs of a segment to the values of each batch, and drop values that no later segment reads."""
    read = {node for other in later for node in other.inputs}
    for known, results in zip(values, outputs, strict=True):
        known.update(zip(block.outputs, results, strict=True))
        for node in known.keys() - read:
            del known[node]


@dataclass
class _Training:
    """The weights of a segment in training; `inputs` and `references` hold an entry for each batch."""

    block: GraphModule
    weights: list[LatentWeight]
    dtypes: list[torch.dtype]
    inputs: list[list[Any]]
    references: list[Any]
    held_out: list[int]

    def run(self, order: Iterator[int], steps: int, lr: float) -> tuple[float, float, list[Tensor]]:
        """Return the held-out error before and after, and the best weights; no weights where none are better."""
        before = best = self._held_out_error()
        best_values: list[Tensor] = []
        misses = 0
        for step in range(steps):
            self._step(next(order), lr * (1 - step / steps))
            if (step + 1) % max(steps // _EVALUATIONS, 1) and step + 1 < steps:
                continue
            error = self._held_out_error()
            misses = 0 if error < best else misses + 1
            if error < best:
                best, best_values = error, self._values()
            if misses == _PATIENCE:
                break
        return before, best, best_values

    @torch.enable_grad()
    def _step(self, i: int, rate: float) -> None:
        values = [value.requires_grad_() for value in self._values()]
        loss = relative_error(self.block(*values, *self.inputs[i]), self.references[i])
        if not loss.requires_grad:  # the graph detaches its outputs
            return
        gradients = torch.autograd.grad(loss * LOSS_SCALE, values, allow_unused=True)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None:
                weight.descend(gradient, rate)

    @torch.no_grad()
    def _held_out_error(self) -> float:
        values = self._values()
        errors = [relative_error(self.block(*values, *self.inputs[i]), self.references[i]) for i in self.held_out]
        return float(torch.stack(errors).mean())

    def _values(self) -> list[Tensor]:
        """Return the weights as they will be stored."""
        pairs = zip(self.weights, self.dtypes, strict=True)
        return [_stored(weight.values().to(dtype), weight.spec) for weight, dtype in pairs]


def _stored(values: Tensor, spec: MXSpec) -> Tensor:
    return fake_quantize_mx(values, spec) if spec.has_power_of_two_scale else values


def _scales_of(target: WeightTarget, scales: Mapping[Node, BlockScales]) -> BlockScales | None:
    """Return the scales of a weight that do not follow from its rounded values, by default of nearest rounding;
    None if they follow."""
    spec = target.consumers[0].spec
    if spec.has_power_of_two_scale:
        return None
    known = scales.get(target.consumers[0].node)
    return known or nearest_scales(target.value.detach(), spec, shared_tensor_scale(target, scales))


def _latent(target: WeightTarget, exact: Tensor, scales: BlockScales | None) -> LatentWeight:
    spec, value = target.consumers[0].spec, target.value.detach()
    if scales is None:
        return LatentWeight(exact, fake_quantize_mx(value, spec), spec)
    return LatentWeight(exact, scales.round(value), spec, scales.of_values(value.shape[spec.axis]))


def _is_learnable(target: WeightTarget, nodes: set[Node]) -> bool:
    local = all(consumer.node in nodes and consumer.matmul is not None for consumer in target.consumers)
    return local and not reason_not_rounded(target)


def _consumer_in(target: WeightTarget, nodes: set[Node]) -> str:
    return next(consumer.node.name for consumer in target.consumers if consumer.node in nodes)


def _with_weights(
    model: GraphModule, block: ModuleBlock, targets: list[WeightTarget], quantized: Sequence[_Quantized]
) -> GraphModule:
    """Return the segment as a graph that takes the weights of `targets` and its inputs as arguments.

    Everything else that is quantized is fake-quantized in the graph.
    """
    run, copies = block.copy(model)
    first = next(iter(run.graph.nodes))
    trained = set()
    for i, target in enumerate(targets):
        with run.graph.inserting_before(first):
            argument = run.graph.placeholder(f"weight_{i}")
        for consumer in target.consumers:
            if consumer.node in copies:
                copies[consumer.node].replace_input_with(copies[consumer.weight], argument)
                trained.add((consumer.node, consumer.weight))
    made: dict[tuple[Node, MXSpec], Node] = {}
    for node, tensor, spec in quantized:
        if (node, tensor) in trained or node not in copies:  # unused nodes have no copy
            continue
        if (tensor, spec) not in made:
            with run.graph.inserting_before(copies[node]):
                call = FakeQuantize(copies[tensor], spec, None, "identity")
                made[tensor, spec] = run.graph.call_function(ops.fake_quantize_mx, call.args)
        copies[node].replace_input_with(copies[tensor], made[tensor, spec])
    run.graph.eliminate_dead_code()
    run.recompile()
    return run


def _order(numbers: list[int], generator: torch.Generator) -> Iterator[int]:
    """Yield the numbers in one random order after the other, forever."""
    while True:
        for i in torch.randperm(len(numbers), generator=generator).tolist():
            yield numbers[i]
