"""Attention of a step over a cache of codes, against torch's own over a cache in bfloat16.

    python -m tests.benchmarks.attention [--device cuda] [--slots 512 8192 32768] [--batches 1 16]
        [--formats mxfp8 mxint8 mxfp6 mxfp4 "fp4_e2m1{16}(e4m3)"]

32 heads of queries, 8 of keys, of 128 values, as in Llama 3.1 8B; one query a sequence. Bytes of a token in one layer,
milliseconds of one layer, on a GPU as CUDA graphs, and how many times as fast. "joined": with counters, as the steps of
a few sequences call it (`decoding_attention`, `decoding_attention_mx`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

import pt2mx
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import decoding_attention, decoding_attention_mx
from tests.benchmarks.measure import Row, gpu_medians_in_turns, hardware, medians_in_turns, print_table

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
_FORMATS = ["mxfp8", "mxint8", "mxfp6", "mxfp4", "fp4_e2m1{16}(e4m3)"]


def run(device: str, batch: int, slots: int, formats: list[str]) -> list[Row]:
    def made(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, WIDTH, device=device, dtype=torch.bfloat16)

    query, keys, values = made(HEADS, 1), made(KEY_HEADS, slots), made(KEY_HEADS, slots)
    mask = torch.ones(batch, 1, 1, slots, dtype=torch.bool, device=device)
    dense = partial(F.scaled_dot_product_attention, query, keys, values, mask, enable_gqa=True)
    zeros = torch.zeros(batch * KEY_HEADS, dtype=torch.int32, device=device)
    joined = partial(decoding_attention, query, keys, values, mask, None, zeros)
    names, calls, sizes = ["bfloat16", "bfloat16, joined"], [dense, joined], [keys.nbytes + values.nbytes] * 2
    for name in formats:
        spec = pt2mx.parse(name)
        pairs = [pt2mx.quantize_mx(x, spec) for x in (keys, values)]
        codes = [tensor for scale, data in pairs for tensor in (data, scale)]
        args = query, *codes, spec.element.name, spec.block_size, WIDTH, mask, None
        scales = None if spec.has_plain_scale else spec.scale_format.name
        calls += [partial(attention_mx, *args, scales), partial(decoding_attention_mx, *args, zeros, scales)]
        names += [name, f"{name}, joined"]
        sizes += [sum(tensor.nbytes for tensor in codes)] * 2
    on_gpu = device.startswith("cuda")
    times = gpu_medians_in_turns(list(map(graph, calls)), 20) if on_gpu else medians_in_turns(calls, 20)
    return [
        {
            "batch": batch,
            "slots": slots,
            "cache": name,
            "bytes a token": size // (batch * slots),
            "ms": f"{1e3 * time:.3f}",
            "times": f"{times[0] / time:.2f}",
        }
        for name, size, time in zip(names, sizes, times, strict=True)
    ]


def graph(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph, without the time of its launches."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, nargs="+", default=[512, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--formats", nargs="+", default=_FORMATS)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = [(batch, slots) for batch in options.batches for slots in options.slots]
    rows = [row for batch, slots in cases for row in run(options.device, batch, slots, options.formats)]
    print_table(rows, tuple(rows[0]))
    print(hardware())


if __name__ == "__main__":
    main()
