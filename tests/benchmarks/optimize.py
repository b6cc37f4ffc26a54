"""Time and memory of `pt2mx.optimize` on a decoder of the shape of Llama 3.1 8B, random weights in bfloat16.

    python -m tests.benchmarks.optimize [--layers 32] [--tokens 32768] [--device cuda]
    torchrun --nproc-per-node 2 -m tests.benchmarks.optimize --layers 8

FP4 weights of the decoder's linear layers, preset "balanced", new weights in place. Under torchrun each rank runs its
share of the batches. Seconds of calibration and rounding, and peak memory of the device over the memory of the model.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.fx import GraphModule

import pt2mx
from tests.benchmarks.language import VOCABULARY, llama
from tests.benchmarks.measure import report
from tests.models import module_of


def exported(layers: int, sequence: int, device: str) -> GraphModule:
    """The decoder of tokens (1, sequence), without a cache."""
    model = llama("8b", layers, device)

    ids = torch.zeros(1, sequence, dtype=torch.long, device=device)
    with torch.no_grad():
        logits = module_of(lambda self, ids: self.model(ids, use_cache=False).logits, model=model)
        return torch.export.export(logits, (ids,), strict=False).module()


def run(layers: int, tokens: int, device: str, group: dist.ProcessGroup | None) -> dict[str, object]:
    sequence = 2048 if layers > 2 else 256
    ranks, rank = (group.size(), group.rank()) if group else (1, 0)
    graph = exported(layers, sequence, device)
    size = sum(tensor.nbytes for tensor in graph.parameters())
    config = pt2mx.get_default_mx_quantization_config(weight=pt2mx.MXSpec("mxfp4", scale_mode="even"), activation=None)
    quantizer = pt2mx.MXQuantizer().set_global(config).set_operator_type("aten.embedding", None)
    quantizer.set_module_name("model.lm_head", None)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, VOCABULARY, (max(tokens // sequence, 1), 1, sequence), generator=generator)
    own = [batch.to(device) for batch in batches[rank::ranks]]
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    optimized = pt2mx.optimize(graph, quantizer, own, in_place=True, group=group, progress=rank == 0)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    weights = pt2mx.optimization_report(optimized).weights
    peak = torch.cuda.max_memory_allocated() / size if device.startswith("cuda") else float("nan")
    return {
        "layers": layers,
        "ranks": ranks,
        "model GB": f"{size / 1e9:.2f}",
        "tokens": tokens,
        "seconds": f"{seconds:.1f}",
        "peak / model": f"{peak:.2f}",
        "by GPTQ": sum(w.algorithm == "gptq" for w in weights),
        "of": len(weights),
        "error / nearest": f"{sum(w.after / w.before for w in weights) / len(weights):.3f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768, help="of the calibration, of all ranks; default: 32768")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device, group = options.device, None
    if "RANK" in os.environ:
        local = int(os.environ["LOCAL_RANK"])
        if device == "cuda":
            torch.cuda.set_device(local)
            device = f"cuda:{local}"
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        group = dist.group.WORLD
    row = run(options.layers, options.tokens, device, group)
    if group is None or group.rank() == 0:
        report([row])
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
