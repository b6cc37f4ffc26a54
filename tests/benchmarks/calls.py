"""Calls of small operators on the CPU: by `torch.ops.pt2mx` or a public function, and as compiled code makes them.

    python -m tests.benchmarks.calls [--threads 1 2] [--calls 300] [--repeats 15]

Microseconds of a call whose kernel has little to do: a linear layer of 32x32, an activation of 576 values, attention of
9 heads over 16 slots, and the public functions of 512 values. Both sides take turns, and a figure is a median.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import pt2mx
from pt2mx import ops
from pt2mx.kernels.cpu.prepared import PreparedActivation, PreparedAttention, PreparedLinear
from tests.benchmarks.measure import Row, medians_in_turns, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--calls", type=int, default=300, help="of a timing; default: 300")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    rows: list[Row] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name, sides in (
            ("linear_mx", linear()),
            ("activation_fake_quantize_mx", activation()),
            ("attention_mx", attention()),
            *((name, (call,)) for name, call in functions().items()),
        ):
            seconds = medians_in_turns([repeated(call, args.calls) for call in sides], args.repeats)
            microseconds = [1e6 * one / args.calls for one in seconds]
            row: Row = {"operator": name, "threads": threads, "operator us": microseconds[0], "compiled us": ""}
            if len(sides) > 1:
                row["compiled us"] = microseconds[1]
            rows.append(row)
    report(rows)


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            for _ in range(times):
                call()

    return run


def quantized(*shape: int, element: str) -> list[Tensor]:
    """Return the codes and scales of random values."""
    scale, data = ops.quantize_mx(torch.randn(shape), element, 32, -1, "floor", "even")
    return [data, scale]


def linear() -> tuple[Callable[[], object], Callable[[], object]]:
    x, weight = torch.randn(1, 32).bfloat16(), quantized(32, 32, element="fp4_e2m1")
    shapes, out, options = [tuple(t.shape) for t in (x, *weight)], torch.empty_like(x), ("fp4_e2m1", 32, 0)
    call = PreparedLinear(*shapes, x.dtype, x.dtype, *options)
    return lambda: torch.ops.pt2mx.linear_mx(x, *weight, None, *options), lambda: call(x, *weight, out=out)


def activation() -> tuple[Callable[[], object], Callable[[], object]]:
    x, options = torch.randn(1, 576).bfloat16(), ("none", "int8", 32, "floor", "even")
    call, out = PreparedActivation(tuple(x.shape), x.dtype, x.dtype, *options), torch.empty_like(x)
    return lambda: torch.ops.pt2mx.activation_fake_quantize_mx(x, *options), lambda: call(x, out=out)


def attention() -> tuple[Callable[[], object], Callable[[], object]]:
    query, options = torch.randn(1, 9, 1, 64).bfloat16(), ("int8", 32, 64)
    cache = [t for _ in range(2) for t in quantized(1, 3, 16, 64, element="int8")]
    shapes, out = [tuple(t.shape) for t in (query, *cache)], torch.empty_like(query)
    call = PreparedAttention(*shapes, None, query.dtype, *options, None)
    return lambda: torch.ops.pt2mx.attention_mx(query, *cache, *options), lambda: call(query, *cache, out=out)


def functions() -> dict[str, Callable[[], object]]:
    x, spec = torch.randn(8, 64), pt2mx.parse("mxfp8")
    scale, data = pt2mx.quantize_mx(x, spec)
    return {
        "pt2mx.quantize_mx": lambda: pt2mx.quantize_mx(x, spec),
        "pt2mx.fake_quantize_mx": lambda: pt2mx.fake_quantize_mx(x, spec),
        "pt2mx.dequantize_mx": lambda: pt2mx.dequantize_mx(data, scale, spec),
    }


if __name__ == "__main__":
    main()
