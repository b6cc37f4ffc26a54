"""Memory and time of a training step: LoRA on packed weights beside full fine-tuning in bfloat16, of one Llama shape.

    python -m tests.benchmarks.lora [--tokens 128 256 512] [--rank 16] [--recipe mxfp4_weight_only] [--layers 30]
        [--shape 135m|1b] [--device cuda]

Random weights in the shape of SmolLM2-135M or Llama-3.2-1B, exported with the cache on both sides. AdamW trains all
weights, or adapters of all projections. The peak is that of torch's tensors in a step: parameters, gradients,
optimizer state, what the backward pass keeps, and temporary tensors; on a CPU by `MemTracker`, on a GPU by torch's
allocator.

Reach: a peak of at most .45 of full fine-tuning's.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx import GraphModule

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.pt2e.language import decoder
from tests.benchmarks.language import config_of
from tests.benchmarks.measure import Row, report, timed

PROJECTIONS = r".*\.(q|k|v|o|gate|up|down)_proj"


class Step(NamedTuple):
    """The peak of a step in bytes, and its seconds."""

    peak: int
    seconds: float


def sides(options: argparse.Namespace) -> tuple[pt2mx.LanguageModel, list[GraphModule]]:
    """Return the quantized model, and the graphs of full fine-tuning and of LoRA."""
    transformers = import_extra("transformers", "hf")
    torch.manual_seed(0)
    config = config_of(options.shape, options.layers)
    model = transformers.LlamaForCausalLM(config).to(options.device, torch.bfloat16).eval()
    quantized = pt2mx.quantize_language_model(model, pt2mx.MXQuantizer.from_recipe(options.recipe))
    lora = pt2mx.add_lora(quantized.program, options.rank, 2 * options.rank, PROJECTIONS)
    return quantized, [decoder.export_decoder(model).module(check_guards=False).requires_grad_(), lora]


def step(graph: GraphModule, inputs: Callable[[Tensor], dict[str, Any]], tokens: Tensor) -> Step:
    """Measure the second step of AdamW, and the peak of a third."""
    optimizer = torch.optim.AdamW([p for p in graph.parameters() if p.requires_grad], 1e-4, foreach=False)

    def train() -> None:
        logits = graph.forward(**inputs(tokens))  # a call runs hooks of MemTracker, which fail for frozen parameters
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize()

    train()
    seconds = timed(train)
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    return Step(_peak(train, [t.detach() for t in (*graph.parameters(), *graph.buffers(), *state)]), seconds)


def _peak(call: Callable[[], None], held: list[Tensor]) -> int:
    """Return the most bytes of tensors in a call, the held ones included."""
    if held[0].is_cuda:
        others = torch.cuda.memory_allocated() - sum({t.data_ptr(): t.nbytes for t in held if t.is_cuda}.values())
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - others
    tracker = MemTracker()
    tracker.track_external(*held)
    with tracker:
        call()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--shape", choices=("135m", "1b"), default="135m")
    parser.add_argument("--layers", type=int, help="by default those of the shape")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model, graphs = sides(options)
    rows: list[Row] = []
    for length in options.tokens:
        tokens = torch.randint(model.config.vocab_size, (1, length), device=options.device)
        full, lora = (step(graph, model.training_inputs, tokens) for graph in graphs)
        row = {"tokens": length, "full, MB": full.peak / 1e6, "LoRA, MB": lora.peak / 1e6}
        rows.append({**row, "LoRA over full": lora.peak / full.peak, "full, s": full.seconds, "LoRA, s": lora.seconds})
    report(rows)


if __name__ == "__main__":
    main()
