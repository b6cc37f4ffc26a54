"""Time the experts' matmuls (`grouped_linear_mx`) of a float32 model: x in float32, and the same values in bfloat16
with a float32 result.

    python -m tests.benchmarks.experts [--device cuda] [--format mxfp8] [--repeats 20]

Milliseconds, in turns, of calls as a program makes them, with the weight dequantized at each call, and the relative
errors of both against float64. Rows are shared among the experts at random. On the CPU the first call checks whether
bfloat16 represents x; the second call shows the cost of this check.
"""

from collections.abc import Iterator
from functools import partial

import torch

import pt2mx
from pt2mx.ops.linear import grouped_linear_mx
from tests.benchmarks.measure import Row, gpu_medians_in_turns, medians_in_turns, run_formats
from tests.compare import relative_error

#: experts, N, K, rows of x
_SIZES = ((8, 1536, 1024, 2048), (8, 1536, 1024, 64), (16, 4096, 2048, 8192), (128, 1536, 2048, 4096))


@torch.no_grad()
def measured(device: str, spec: pt2mx.MXSpec, repeats: int) -> Iterator[Row]:
    medians = gpu_medians_in_turns if device == "cuda" else medians_in_turns
    for experts, n, k, count in _SIZES:
        scale, data = pt2mx.quantize_mx(torch.randn(experts, n, k, device=device), spec.replace(axis=-1))
        x = pt2mx.fake_quantize_mx(torch.randn(count, k, device=device), spec)
        offs = torch.randint(count + 1, (experts - 1,)).sort().values
        offs = torch.cat([offs, torch.tensor([count])]).to(device, torch.int32)
        modes = data, scale, offs, spec.element.name, spec.block_size
        calls = [partial(grouped_linear_mx, x, *modes), partial(grouped_linear_mx, x.bfloat16(), *modes, torch.float32)]
        wide, narrow = medians(calls, repeats)
        weight = pt2mx.dequantize_mx(data, scale, spec.replace(axis=-1)).double()
        ends = [0, *offs.tolist()]
        exact = torch.cat([x[a:b].double() @ w.T for a, b, w in zip(ends, ends[1:], weight, strict=False)])
        errors = [f"{relative_error(call(), exact):.1e}" for call in calls]
        times = {"x in float32": 1e3 * wide, "in bfloat16": 1e3 * narrow, "ratio": narrow / wide}
        yield {"size": f"{experts}x{n}x{k}", "rows": count} | times | {"error": errors[0], "of bfloat16": errors[1]}


if __name__ == "__main__":
    run_formats("tests.benchmarks.experts", __doc__, measured)
