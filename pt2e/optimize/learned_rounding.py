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
from pt2mx.algorithms.options import LearnedRounding
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import FakeQuantize, tensor_of
from pt2mx.pt2e.observe.torchao_pt2e import Quantizer
from pt2mx.pt2e.optimize.losses import LOSS_SCALE, check_batches, hold_out, relative_error
from pt2mx.pt2e.optimize.segments import ModuleBlock, module_blocks, placeholder_values
from pt2mx.pt2e.optimize.stored_codes import shared_tensor_scale
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
    options: LearnedRounding,
    scales: dict[Node, BlockScales],
    progress: bool = False,
) -> list[LearnedBlock]:
    """Learn better roundings by signed gradient descent (Cheng et al., arXiv:2309.05516), starting from the current
    ones.

    Each segment is trained on its float inputs and compared with its float outputs. The step with the best outputs on
    the held-out batches is kept, possibly the start.

    Args:
        model: an exported graph, its weights rounded or not. It is changed.
        original: the same graph with float weights.
        quantizer: decides what is quantized, activations included.
        batches: as `pt2mx.optimize` takes them. One of eight is held out; a single one is not. A step is a batch.
        options: how many steps a segment takes at most, and the seed for the choice of held-out batches and the order
            of the others.
        scales: the scales of rounded weights that do not follow from their values, by the first consumer. It gets those
            of the weights that change.

    Returns:
        The segments that have changed. A weight does not change if several segments use it, if no known matmul uses it,
        or if its segment uses memory that the graph writes.
    """
    check_batches(batches)
    generator = torch.Generator().manual_seed(options.seed)
    train, held_out = hold_out(len(batches), generator)
    blocks, targets, written = module_blocks(model), weight_targets(model, quantizer), written_nodes(model.graph)
    float_blocks = module_blocks(original)
    floats = {}
    for target in weight_targets(original, quantizer):
        for consumer in target.consumers:
            if consumer.node.graph is original.graph:
                floats[consumer.node.name] = target.value.detach()
    quantized = [(node, tensor, spec) for node, tensor, _, spec in quantized_inputs(model, quantizer)]
    values = placeholder_values(model, batches)
    for node in model.graph.find_nodes(op="get_attr"):
        if node in written:
            for known in values:
                known[node] = tensor_of(model, node).clone()
    learned = []
    with tqdm(blocks, disable=not progress, file=sys.stderr) as bar:
        for i, block in enumerate(bar):
            bar.set_postfix_str(block.name)
            nodes = set(block.nodes)
            inputs = [[known[node] for node in block.inputs] for known in values]
            with torch.no_grad():
                float_block, _ = float_blocks[i].copy(original)
                references = [float_block(*arguments) for arguments in inputs]
            weights = []
            for target in targets:
                if _is_learnable(target, nodes) and not nodes & written:
                    exact = floats[target.consumers[0].node.name]
                    weights.append(_trained(target, exact, scales))
            if weights:
                run = _with_weights(model, block, weights, quantized)
                training = _Training(run, weights, inputs, references, held_out)
                before, after, best = training.run(_order(train, generator), options.steps)
                if best:
                    for weight, value in zip(weights, best, strict=True):
                        set_weight(model, weight.target, value)
                        if weight.scales is not None:
                            scales[weight.target.consumers[0].node] = weight.scales
                    names = tuple(weight.target.name for weight in weights)
                    learned.append(LearnedBlock(block.name, names, before, after))
            _advance(values, block, references, blocks[i + 1 :])
    model.recompile()
    return learned


@dataclass
class _Weight:
    """A weight in training, and its scales if they do not follow from its values."""

    target: WeightTarget
    latent: LatentWeight
    scales: BlockScales | None

    def stored(self) -> Tensor:
        """Return the weight as it will be stored."""
        values = self.latent.values().to(self.target.value.dtype)
        return fake_quantize_mx(values, self.latent.spec) if self.scales is None else values


def _trained(target: WeightTarget, exact: Tensor, scales: Mapping[Node, BlockScales]) -> _Weight:
    """Return a weight to train from its current value; without known scales from those of nearest rounding."""
    spec, value = target.consumers[0].spec, target.value.detach()
    if spec.has_power_of_two_scale:
        return _Weight(target, LatentWeight(exact, fake_quantize_mx(value, spec), spec), None)
    known = scales.get(target.consumers[0].node)
    if known is None:
        known = nearest_scales(value, spec, shared_tensor_scale(target, scales))
    of_values = known.of_values(value.shape[spec.axis])
    return _Weight(target, LatentWeight(exact, known.round(value), spec, of_values), known)


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
    weights: list[_Weight]
    inputs: list[list[Any]]
    references: list[Any]
    held_out: list[int]

    def run(self, order: Iterator[int], steps: int) -> tuple[float, float, list[Tensor]]:
        """Return the held-out error before and after, and the best weights; no weights where none are better.

        The rate decays to zero, and moves a value by at most half the distance to its neighbour in total.
        """
        before = best = self._held_out_error()
        best_values: list[Tensor] = []
        misses = 0
        for step in range(steps):
            self._step(next(order), 1 / steps * (1 - step / steps))
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
                weight.latent.descend(gradient, rate)

    @torch.no_grad()
    def _held_out_error(self) -> float:
        values = self._values()
        errors = [relative_error(self.block(*values, *self.inputs[i]), self.references[i]) for i in self.held_out]
        return float(torch.stack(errors).mean())

    def _values(self) -> list[Tensor]:
        return [weight.stored() for weight in self.weights]


def _is_learnable(target: WeightTarget, nodes: set[Node]) -> bool:
    local = all(consumer.node in nodes and consumer.matmul is not None for consumer in target.consumers)
    is_codebook = any(consumer.spec.element.values for consumer in target.consumers)  # without steps to learn
    return local and not is_codebook and not reason_not_rounded(target)


def _with_weights(
    model: GraphModule, block: ModuleBlock, weights: list[_Weight], quantized: Sequence[_Quantized]
) -> GraphModule:
    """Return the segment as a graph that takes the weights and its inputs as arguments.

    Everything else that is quantized is fake-quantized in the graph.
    """
    run, copies = block.copy(model)
    nodes, first = set(block.nodes), next(iter(run.graph.nodes))
    trained = set()
    for i, weight in enumerate(weights):
        with run.graph.inserting_before(first):
            argument = run.graph.placeholder(f"weight_{i}")
        for consumer in weight.target.consumers:
            if consumer.node in copies:
                copies[consumer.node].replace_input_with(copies[consumer.weight], argument)
                trained.add((consumer.node, consumer.weight))
    made: dict[tuple[Node, MXSpec], Node] = {}
    for node, tensor, spec in quantized:
        if (node, tensor) in trained or node not in nodes or node not in copies:  # unused nodes have no copy
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
