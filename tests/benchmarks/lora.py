"""Memory and time of a training step: LoRA on packed weights beside full fine-tuning in bfloat16, of one Llama shape.

    python -m tests.benchmarks.lora [--tokens 128 256 512] [--rank 16] [--recipe mxfp4_weight_only] [--layers 30]

Random weights in the shape of SmolLM2-135M, exported with the cache on both sides. AdamW trains all weights, or
adapters of all projections. The peak is that of torch's tensors in a step (`MemTracker`): parameters, gradients,
optimizer state, what the backward pass keeps, and temporary tensors.

Reach: a peak of at most .45 of full fine-tuning's.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx import GraphModule

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.pt2e.language import decoder

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
PROJECTIONS = r".*\.(q|k|v|o|gate|up|down)_proj"


class Step(NamedTuple):
    """The peak of a step in bytes, and its seconds."""

    peak: int
    seconds: float


def sides(recipe: str, rank: int, **shape: object) -> tuple[pt2mx.LanguageModel, list[GraphModule]]:
    """Return the quantized model, and the graphs of full fine-tuning and of LoRA."""
    transformers = import_extra("transformers", "hf")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **shape})).to(torch.bfloat16).eval()
    quantized = pt2mx.quantize_language_model(model, pt2mx.MXQuantizer.from_recipe(recipe))
    lora = pt2mx.add_lora(quantized.program, rank, 2 * rank, PROJECTIONS)
    return quantized, [decoder.export_decoder(model).module(check_guards=False).requires_grad_(), lora]


def step(graph: GraphModule, inputs: Callable[[Tensor], dict[str, Any]], tokens: Tensor) -> Step:
    """Measure the second step of AdamW, and the peak of a third."""
    optimizer = torch.optim.AdamW([p for p in graph.parameters() if p.requires_grad], 1e-4, foreach=False)
    _train(graph, inputs(tokens), tokens, optimizer)
    start = time.perf_counter()
    _train(graph, inputs(tokens), tokens, optimizer)
    seconds = time.perf_counter() - start
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    held = [tensor.detach() for tensor in (*graph.parameters(), *graph.buffers(), *state)]
    tracker = MemTracker()
    tracker.track_external(*held)
    with tracker:
        _train(graph, inputs(tokens), tokens, optimizer)
    return Step(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], seconds)


def _train(graph: GraphModule, inputs: dict[str, Any], tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    logits = graph.forward(**inputs)  # a call runs hooks of MemTracker, which fail for frozen parameters
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def run(lengths: list[int], recipe: str, rank: int, **shape: object) -> Iterator[tuple[int, Step, Step]]:
    """Yield (tokens, full fine-tuning, LoRA)."""
    model, graphs = sides(recipe, rank, **shape)
    for length in lengths:
        tokens = torch.randint(SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))
        yield length, *(step(graph, model.training_inputs, tokens) for graph in graphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    options = parser.parse_args()
    print(
        "| tokens | full, MB | LoRA, MB | LoRA over full | full, s | LoRA, s |\n|---|---|---|---|---|---|", flush=True
    )
    for length, full, lora in run(options.tokens, options.recipe, options.rank, num_hidden_layers=options.layers):
        peaks = f"{full.peak / 1e6:.0f} | {lora.peak / 1e6:.0f} | {lora.peak / full.peak:.2f}"
        print(f"| {length} | {peaks} | {full.seconds:.1f} | {lora.seconds:.1f} |", flush=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")


if __name__ == "__main__":
    main()
