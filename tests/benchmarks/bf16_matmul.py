"""Time matmuls of quantized float32 activations and packed weights with bfloat16 instructions, against float32 matmuls
of the same values.

    python -m tests.benchmarks.bf16_matmul [--sizes 2048x1536x384 ...] [--elements int8 ...] [--repeats 15] [--json]

Milliseconds, measured in turns: `F.linear` of dense operands in float32 and in bfloat16, and `linear_mx` of
x in bfloat16 with a float32 result, with each instruction set that the processor has (INT8 only for elements
that are integers). In the column `quantize`, the call also quantizes x from float32, with the default instruction set.
Errors are relative to the matmul in float64.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec, ops
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.ops.hadamard import rotated_fake_quantize_mx
from pt2mx.ops.linear import linear_mx
from tests.benchmarks.measure import Row, medians_in_turns, report

_BLOCK = 32
#: rows of x, rows of the weight, values of a row
_SIZES = ("2048x1536x384", "2048x384x1536", "512x4096x4096", "64x4096x4096")
_UNITS = {unit: getattr(cpu_linear, unit) for unit in ("AVX512_BF16", "INT8", "AMX")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=_SIZES, metavar="MxNxK")
    parser.add_argument("--elements", nargs="+", choices=FORMATS, default=("int8", "fp8_e4m3", "fp6_e2m3", "fp4_e2m1"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not cpu_linear.isa_for(MXSpec("int8", _BLOCK), _BLOCK):
        parser.exit(1, "this processor has no bfloat16 instructions\n")
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    rows = [row for name in options.elements for size in sizes for row in measured(name, *size, options.repeats)]
    report(rows, tuple(max(rows, key=len)), options.json)


@torch.no_grad()
def measured(name: str, m: int, n: int, k: int, repeats: int) -> Iterator[Row]:
    given, weight = torch.randn(m, k), torch.randn(n, k)
    scale, data = ops.quantize_mx(weight, name, _BLOCK, -1, "floor", "even")
    dense = ops.dequantize_mx(data, scale, name, _BLOCK, torch.float32, -1, k)
    x = ops.fake_quantize_mx(given, name, _BLOCK, -1, "floor", "even", None, "identity")
    half, dense_half = x.bfloat16(), dense.bfloat16()

    def ours(x: Tensor, units: int) -> Tensor:
        with mock.patch.object(cpu_linear, "isa_for", lambda spec, k: units):
            return linear_mx(x, data, scale, None, name, _BLOCK, 0, torch.float32)

    def quantized() -> Tensor:
        return ours(rotated_fake_quantize_mx(given, 1, name, _BLOCK, "floor", "even", torch.bfloat16), present)

    present = cpu_linear.isa_for(MXSpec(name, _BLOCK), k)
    units = {name: number for name, number in _UNITS.items() if number & present}
    calls: dict[str, Callable[[], Tensor]] = {"float32": lambda: F.linear(x, dense)}
    calls |= {"bfloat16": lambda: F.linear(half, dense_half)}
    calls |= {unit: functools.partial(ours, half, number) for unit, number in units.items()}
    calls |= {"quantize": quantized}
    exact = F.linear(x.double(), dense.double())
    seconds = medians_in_turns(list(calls.values()), repeats)
    row: Row = {"element": name, "size": f"{m}x{n}x{k}"}
    row |= {what: 1e3 * second for what, second in zip(calls, seconds, strict=True)}
    row["ratio"] = row["quantize"] / row["float32"]
    errors = [float((f().double() - exact).norm() / exact.norm()) for f in (calls["float32"], quantized)]
    yield row | {"error": f"{errors[1]:.1e}", "float32's": f"{errors[0]:.1e}"}


if __name__ == "__main__":
    main()
