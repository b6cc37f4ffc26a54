"""Time FP4 and FP6 matmuls on FP8 tensor cores against `F.linear` in bfloat16 of the same values.

    python -m tests.benchmarks.fp8_rowwise [--sizes 2048x8192x8192 ...] [--elements fp4_e2m1 ...] [--repeats 30]
        [--json]

On an NVIDIA GPU, microseconds, columns measured in turns, eight calls in a CUDA graph. The matmuls are `F.linear`,
`fake_quantize_mx` of x followed by `F.linear`, and `quantize_fp8_rows` of x followed by `mm_fp8_rows`. The quantizing
kernels are timed alone too, also with GELU and with a layer norm of a sum, to FP8 rows and to bfloat16 values. Errors
are relative to the matmul in float64.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import ops
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.fp8_rowwise import ROOMS
from pt2mx.ops.activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from pt2mx.ops.fp8_rowwise import layer_norm_fp8_rows, mm_fp8_rows, quantize_fp8_rows
from tests.benchmarks.linear import graph_seconds
from tests.benchmarks.measure import Row, report

_SIZES = ("2048x8192x8192", "4096x4096x1024", "4096x1024x4096", "4096x1024x1024", "4096x3072x1024")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=_SIZES, metavar="MxNxK")
    parser.add_argument("--elements", nargs="+", choices=tuple(ROOMS), default=tuple(ROOMS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row_of(size, element, options.repeats) for size in options.sizes for element in options.elements]
    report(rows, None, options.json)


@torch.no_grad()
def row_of(size: str, element: str, repeats: int) -> Row:
    m, n, k = map(int, size.split("x"))
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    dense = ops.fake_quantize_mx(w, element, BLOCK, -1, "floor", "even", None, "identity")
    weight, scale, _ = quantize_fp8_rows(w, element, "floor", "even", "none")
    sides: dict[str, Callable[[Tensor, int], object]] = {
        "bfloat16": lambda x, _: F.linear(x, dense, bias),
        "quantize_bfloat16": lambda x, _: F.linear(
            ops.fake_quantize_mx(x, element, BLOCK, -1, "floor", "even", None, "identity"), dense, bias
        ),
        "fp8_rowwise": lambda x, _: mm_fp8_rows(
            *quantize_fp8_rows(x, element, "floor", "even", "none"), weight, scale, bias
        ),
        "quantize": lambda x, _: quantize_fp8_rows(x, element, "floor", "even", "none"),
        "gelu": lambda x, _: quantize_fp8_rows(x, element, "floor", "even", "gelu"),
        "layer_norm": lambda x, _: layer_norm_fp8_rows(x, x, w[0], w[0], 1e-5, element, "floor", "even"),
        "values": lambda x, _: activation_fake_quantize_mx(x, "none", element, BLOCK, "floor", "even"),
        "gelu_values": lambda x, _: activation_fake_quantize_mx(x, "gelu", element, BLOCK, "floor", "even"),
        "layer_norm_values": lambda x, _: layer_norm_fake_quantize_mx(
            x, x, w[0], w[0], 1e-5, element, BLOCK, "floor", "even"
        ),
    }
    times = [1e6 * seconds for seconds in graph_seconds([(side, x) for side in sides.values()], repeats)]
    row: Row = {"element": element, "size": size, **dict(zip(sides, times, strict=True))}
    some = x[:256]
    values = ops.fake_quantize_mx(some, element, BLOCK, -1, "floor", "even", None, "identity")
    exact = values.double() @ dense.double().T + bias
    got = mm_fp8_rows(*quantize_fp8_rows(some, element, "floor", "even", "none"), weight, scale, bias)
    for name, y in (("error_bfloat16", F.linear(values, dense, bias)), ("error", got)):
        row[name] = f"{((y.double() - exact).norm() / exact.norm()).item():.4e}"
    return row | {"speed_up": times[0] / times[2]}


if __name__ == "__main__":
    main()
