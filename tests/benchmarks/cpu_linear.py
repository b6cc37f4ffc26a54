"""linear_mx of a few rows of x on the CPU, in the shapes of a decoder, against the read bandwidth of the memory.

    python -m tests.benchmarks.cpu_linear [--shapes 8192x2048 ...] [--elements fp4_e2m1 ...] [--x bfloat16 ...]
        [--m 1 4 16] [--repeats 7] [--cache MB]

`read` is the bandwidth of a sum of int64 values. `GB/s` counts the codes and the scales of the weight at M=1, and
`share` is GB/s over `read`. `M=4` is the time with four rows of x over the time with one. x is bfloat16, float32, or
mxint8: bfloat16 values that an MXINT8 activation has. A timing multiplies by copies of the weight that together take
--cache MB, which exceeds the last-level cache, and the sum reads as many bytes; both take turns, and a figure is the
ratio of their medians. Calls are those of compiled code (`pt2mx.kernels.cpu.prepared`).
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pt2mx import ops
from pt2mx.kernels.cpu.prepared import PreparedLinear
from tests.benchmarks.measure import Row, keep_heap, medians_in_turns, report

_BLOCK = 32
_SHAPES = ("8192x2048", "2048x8192", "2048x2048")
_ELEMENTS = ("fp4_e2m1", "fp6_e2m3", "int8", "fp8_e4m3")
#: kind of x -> the activation of random values
_X: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": Tensor.bfloat16,
    "float32": Tensor.float,
    "mxint8": lambda x: ops.fake_quantize_mx(x, "int8", _BLOCK, -1, "floor", "even", None, "identity").bfloat16(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=_SHAPES, help="rows of the weight x values of a row")
    parser.add_argument("--elements", nargs="+", default=_ELEMENTS)
    parser.add_argument("--x", nargs="+", choices=_X, default=tuple(_X))
    parser.add_argument("--m", type=int, nargs="+", default=(1, 4, 16), help="rows of x; the first are the baseline")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cache", type=int, default=512, help="MB that the copies of a weight take; default: 512")
    args = parser.parse_args()
    keep_heap("tests.benchmarks.cpu_linear")
    torch.manual_seed(0)
    report(list(measured(args)))


@torch.no_grad()
def measured(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each shape, element and kind of x."""
    for shape in args.shapes:
        n, k = map(int, shape.split("x"))
        for element in args.elements:
            weight = ops.quantize_mx(torch.randn(n, k), element, _BLOCK, -1, "floor", "even")
            bytes_of_weight = sum(part.nbytes for part in weight)
            copies = [[part.clone() for part in weight] for _ in range(-(-args.cache * 2**20 // bytes_of_weight))]
            total = bytes_of_weight * len(copies)
            integers = torch.ones(total // 8, dtype=torch.int64)
            for kind in args.x:
                calls = [matmuls(_X[kind](torch.randn(m, k)), copies, element) for m in args.m]
                read, first, *others = medians_in_turns([integers.sum, *calls], args.repeats)
                row: Row = {"N x K": shape, "element": element, "x": kind, "read": total / read / 1e9}
                row |= {"GB/s": total / first / 1e9, "share": read / first}
                yield row | {f"M={m}": seconds / first for m, seconds in zip(args.m[1:], others, strict=True)}


def matmuls(x: Tensor, copies: list[list[Tensor]], element: str) -> Callable[[], None]:
    """Return a call that multiplies x by each copy of the weight."""
    scale, data = copies[0]
    multiply = PreparedLinear(tuple(x.shape), data.shape, scale.shape, x.dtype, x.dtype, element, _BLOCK, 0)
    out = x.new_empty(len(x), len(data))

    def call() -> None:
        for scale, data in copies:
            multiply(x, data, scale, out=out)

    return call


if __name__ == "__main__":
    main()
