"""Attention of a step over a cache of codes, against torch's own over a cache in the model's dtype.

    python -m tests.benchmarks.attention [--device cuda] [--slots 512 8192 32768] [--batches 1 16]
        [--formats mxfp8 mxint8 mxfp6 mxfp4 "fp4_e2m1{16}(e4m3)"] [--dtypes bfloat16] [--widths 128] [--groups 4]
        [--queries 1] [--threads 1] [--write]

8 heads of keys, by default of 128 values with 4 heads of queries each, as in Llama 3.1 8B, and one query a sequence.
With `--write` a call first writes the last token: into a cache of codes with E8M0 scales by `store_mx`, which quantizes
it. Bytes of a token in one layer, milliseconds of one layer, on a GPU as CUDA graphs, and the share of torch's time. On
a CPU, 16 MB are read before each call, as a step reads weights. On a GPU also "joined": with counters, as the steps of
a few sequences call it (`decoding_attention`, `decoding_attention_mx`).
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import pt2mx
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.cache import store_mx
from pt2mx.ops.decoding import decoding_attention, decoding_attention_mx
from tests.benchmarks.measure import Row, gpu_medians_in_turns, keep_heap, medians_in_turns, report

KEY_HEADS = 8
_FORMATS = ["mxfp8", "mxint8", "mxfp6", "mxfp4", "fp4_e2m1{16}(e4m3)"]


class Case(NamedTuple):
    dtype: torch.dtype
    width: int
    group: int
    queries: int
    batch: int
    slots: int


@torch.no_grad()
def run(device: str, case: Case, formats: list[str], writes: bool, repeats: int) -> list[Row]:
    dtype, width, group, queries, batch, slots = case

    def made(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, width, device=device).to(dtype)

    query, keys, values = made(KEY_HEADS * group, queries), made(KEY_HEADS, slots), made(KEY_HEADS, slots)
    mask = torch.ones(batch, 1, queries, slots, dtype=torch.bool, device=device)
    mask[..., -queries:] = torch.ones(queries, queries, device=device).tril()
    new = made(KEY_HEADS, 1), made(KEY_HEADS, 1), torch.tensor([slots - 1], device=device)
    attend = partial(F.scaled_dot_product_attention, query, keys, values, mask, enable_gqa=group > 1)
    calls: list[Callable[[], object]] = [partial(_dense_step, attend, keys, values, *new) if writes else attend]
    names, sizes, on_gpu = ["dense"], [keys.nbytes + values.nbytes], device.startswith("cuda")
    zeros = torch.zeros(batch * KEY_HEADS, dtype=torch.int32, device=device)
    if on_gpu:
        names.append("dense, joined")
        calls.append(partial(decoding_attention, query, keys, values, mask, None, zeros))
        sizes.append(sizes[0])
    for name in formats:
        spec = pt2mx.parse(name)
        if writes and not spec.has_plain_scale:
            continue
        pairs = [pt2mx.quantize_mx(x, spec) for x in (keys, values)]
        codes = [tensor for scale, data in pairs for tensor in (data, scale)]
        args = query, *codes, spec.element.name, spec.block_size, width, mask, None
        scales = None if spec.has_plain_scale else spec.scale_format.name
        attend = partial(attention_mx, *args, scales)
        modes = spec.element.name, spec.block_size, spec.scale_mode, spec.rounding
        store = partial(store_mx, *new[:2], *codes, new[2], *modes)
        calls.append(partial(_step, store, attend) if writes else attend)
        names.append(name)
        sizes.append(sum(tensor.nbytes for tensor in codes))
        if on_gpu:
            names.append(f"{name}, joined")
            calls.append(partial(decoding_attention_mx, *args, zeros, scales))
            sizes.append(sizes[-1])
    if on_gpu:
        times = gpu_medians_in_turns(list(map(graph, calls)), repeats)
    else:
        weights = torch.ones(4 << 20)
        times = medians_in_turns(calls, repeats, weights.sum)
    return [
        {
            **{name: str(value).removeprefix("torch.") for name, value in case._asdict().items()},
            "cache": name,
            "bytes a token": size // (batch * slots),
            "ms": f"{1e3 * time:.3f}",
            "share": f"{time / times[0]:.2f}",
        }
        for name, size, time in zip(names, sizes, times, strict=True)
    ]


def _dense_step(
    attend: Callable[[], Tensor], keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> Tensor:
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
    return attend()


def _step(store: Callable[[], None], attend: Callable[[], Tensor]) -> Tensor:
    store()
    return attend()


def graph(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph, without the time of its launches."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    keep_heap("tests.benchmarks.attention")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, nargs="+", default=[512, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--formats", nargs="+", default=_FORMATS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--widths", type=int, nargs="+", default=[128])
    parser.add_argument("--groups", type=int, nargs="+", default=[4])
    parser.add_argument("--queries", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    sizes = options.widths, options.groups, options.queries, options.batches, options.slots
    cases = itertools.starmap(Case, itertools.product(dtypes, *sizes))
    rows = [row for case in cases for row in run(options.device, case, options.formats, options.write, options.repeats)]
    report(rows)


if __name__ == "__main__":
    main()
