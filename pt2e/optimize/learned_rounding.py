"""Learned rounding of a graph's weights: block by block, outputs come nearer to those of the float block."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from pt2mx import ops
from pt2mx.algorithms.learned_rounding import LatentWeight
from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.attributes import tensor_of
from pt2mx.pt2e.optimize.losses import LOSS_SCALE, check_batches, hold_out, relative_error
from pt2mx.pt2e.optimize.segments import Block, cut_blocks, placeholder_values
from pt2mx.pt2e.optimize.targets import Site, quantized_inputs, set_weight, weight_sites, why_not_rounded
from pt2mx.pt2e.torchao_pt2e import Quantizer
from pt2mx.spec import MXSpec

#: times that the held-out batches are looked at, and how often in a row they may show nothing better
_LOOKS, _PATIENCE = 10, 5

#: operator, quantized tensor and its spec
_Quantized = tuple[Node, Node, MXSpec]


@dataclass(frozen=True)
class LearnedBlock:
    """A block whose weights were rounded anew.

    Args:
        name: its repeated module, such as "encoder.layer.3"; "" of what lies between such.
        weights: the names of the weights.
        before, after: the squared error of its outputs over their squared value, of the held-out batches.
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
) -> list[LearnedBlock]:
    """Round weights anew, from what they are rounded to, by signed gradient descent (Cheng et al., arXiv:2309.05516).

    A block learns from the float inputs of the block, and is compared with its float outputs. It keeps the step whose
    outputs of held-out batches are best, that before the first one too.

    Args:
        model: an exported graph, its weights rounded or not. It is changed.
        original: the same graph with float weights.
        quantizer: says what is quantized, activations too.
        batches: as `pt2mx.optimize` takes them. One of eight is held out; a single one is not.
        steps: most steps of a block, a batch each.
        lr: the first step's way, in distances of neighbouring values of the format; it falls to zero. None: 1 / steps,
            with which a value moves half a distance at most.
        seed: of the batches that are held out, and of their order.
        progress: True shows a bar with the name of each block.

    Returns:
        The blocks that have changed. Weights stay that several blocks read, that no product of the table reads, or that
        are in a block with memory that the graph writes.

    Raises:
        MXError: without batches, and for steps or a rate that are not positive.
    """
    check_batches(batches)
    if steps < 1 or not (lr is None or lr > 0):
        raise MXError(f"learned rounding takes steps and a rate above 0, not steps={steps} and lr={lr}")
    generator = torch.Generator().manual_seed(seed)
    train, held = hold_out(len(batches), generator)
    blocks, sites, written = cut_blocks(model), weight_sites(model, quantizer), written_nodes(model.graph)
    float_blocks = cut_blocks(original)
    originals = [(reader, site) for site in weight_sites(original, quantizer) for reader in site.readers]
    floats = {reader.node.name: site.value for reader, site in originals if reader.node.graph is original.graph}
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
            inside = [site for site in sites if any(reader.node in nodes for reader in site.readers)]
            inputs = [[known[node] for node in block.inputs] for known in values]
            with torch.no_grad():
                float_block, _ = float_blocks[i].copy(original)
                wanted = [float_block(*arguments) for arguments in inputs]
            chosen = [] if nodes & written else [site for site in inside if _is_learnable(site, nodes)]
            if chosen:
                run = _with_weights(model, block, chosen, [q for q in quantized if q[0] in nodes])
                weights = [_latent(site, floats[_reader_in(site, nodes)].detach()) for site in chosen]
                training = _Training(run, weights, [site.value.dtype for site in chosen], inputs, wanted, held)
                before, after, found = training.run(_order(train, generator), steps, lr or 1 / steps)
                if found:
                    for site, value in zip(chosen, found, strict=True):
                        set_weight(model, site, value)
                    learned.append(LearnedBlock(block.name, tuple(site.name for site in chosen), before, after))
            _go_on(values, block, wanted, blocks[i + 1 :])
    model.recompile()
    return learned


def _go_on(values: list[dict[Node, Any]], block: Block, outputs: list[Any], later: list[Block]) -> None:
    """Add the outputs of a block to the values of each batch, and drop those that no later block reads."""
    read = {node for other in later for node in other.inputs}
    for known, found in zip(values, outputs, strict=True):
        known.update(zip(block.outputs, found, strict=True))
        for node in known.keys() - read:
            del known[node]


@dataclass
class _Training:
    """The weights of a block in training. `inputs` and `wanted`: of each batch."""

    block: GraphModule
    weights: list[LatentWeight]
    dtypes: list[torch.dtype]
    inputs: list[list[Any]]
    wanted: list[Any]
    held_out: list[int]

    def run(self, order: Iterator[int], steps: int, lr: float) -> tuple[float, float, list[Tensor]]:
        """The error of the held-out batches before and after, and the best weights; none where none are better."""
        before = best = self._held_out_error()
        found: list[Tensor] = []
        misses = 0
        for step in range(steps):
            self._step(next(order), lr * (1 - step / steps))
            if (step + 1) % max(steps // _LOOKS, 1) and step + 1 < steps:
                continue
            error = self._held_out_error()
            misses = 0 if error < best else misses + 1
            if error < best:
                best, found = error, self._values()
            if misses == _PATIENCE:
                break
        return before, best, found

    @torch.enable_grad()
    def _step(self, i: int, rate: float) -> None:
        values = [value.requires_grad_() for value in self._values()]
        loss = relative_error(self.block(*values, *self.inputs[i]), self.wanted[i])
        if not loss.requires_grad:  # the graph gives the outputs without gradient
            return
        gradients = torch.autograd.grad(loss * LOSS_SCALE, values, allow_unused=True)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None:
                weight.descend(gradient, rate)

    @torch.no_grad()
    def _held_out_error(self) -> float:
        values = self._values()
        errors = [relative_error(self.block(*values, *self.inputs[i]), self.wanted[i]) for i in self.held_out]
        return float(torch.stack(errors).mean())

    def _values(self) -> list[Tensor]:
        """The weights as they will be stored."""
        pairs = zip(self.weights, self.dtypes, strict=True)
        return [fake_quantize_mx(weight.values().to(dtype), weight.spec) for weight, dtype in pairs]


def _latent(site: Site, exact: Tensor) -> LatentWeight:
    spec = site.readers[0].spec
    return LatentWeight(exact, fake_quantize_mx(site.value.detach(), spec), spec)


def _is_learnable(site: Site, nodes: set[Node]) -> bool:
    here = all(reader.node in nodes and reader.product is not None for reader in site.readers)
    return here and not why_not_rounded(site)


def _reader_in(site: Site, nodes: set[Node]) -> str:
    return next(reader.node.name for reader in site.readers if reader.node in nodes)


def _with_weights(model: GraphModule, block: Block, sites: list[Site], quantized: Sequence[_Quantized]) -> GraphModule:
    """The block as a graph of the weights of `sites`, which take the place of its own, and of its inputs; what else is
    quantized is fake-quantized."""
    run, copies = block.copy(model)
    first = next(iter(run.graph.nodes))
    given = set()
    for i, site in enumerate(sites):
        with run.graph.inserting_before(first):
            argument = run.graph.placeholder(f"weight_{i}")
        for reader in site.readers:
            if reader.node in copies:
                copies[reader.node].replace_input_with(copies[reader.weight], argument)
                given.add((reader.node, reader.weight))
    made: dict[tuple[Node, MXSpec], Node] = {}
    for node, tensor, spec in quantized:
        if (node, tensor) in given or node not in copies:  # nothing reads the latter
            continue
        if (tensor, spec) not in made:
            with run.graph.inserting_before(copies[node]):
                made[tensor, spec] = run.graph.call_function(ops.fake_quantize_mx, (copies[tensor], *spec.op_args()))
        copies[node].replace_input_with(copies[tensor], made[tensor, spec])
    run.graph.eliminate_dead_code()
    run.recompile()
    return run


def _order(numbers: list[int], generator: torch.Generator) -> Iterator[int]:
    """The numbers in random orders, without end."""
    while True:
        for i in torch.randperm(len(numbers), generator=generator).tolist():
            yield numbers[i]
