"""Time matmuls of two quantized activations, and attention over them, against torch's in float32 and bfloat16.

    python -m tests.benchmarks.activation_matmuls [--device cuda] [--format mxfp8] [--results bfloat16] [--repeats 20]

Milliseconds, in turns, on a GPU as CUDA graphs. "ours" are `matmul_bfloat16` and `attention_bfloat16` of the operands
of torch's float32 operators. On a GPU the operands are in bfloat16, as the quantizing kernel writes them. With
`--results bfloat16`, only attention is compared, with bfloat16 operands and torch's attention in bfloat16. Errors are
relative to the operation in float64.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import pt2mx
from pt2mx.ops.attention import matmul_bfloat16
from tests.attention import attend
from tests.benchmarks.attention import graph
from tests.benchmarks.measure import Row, gpu_medians_in_turns, medians_in_turns, run_formats
from tests.compare import relative_error

#: sequences, heads, tokens, values of a head: MiniLM, BERT, BERT-large, longer ones
_ATTENTIONS = (
    *((32, 12, 64, 32), (32, 12, 128, 32), (8, 12, 128, 64)),
    *((32, 16, 128, 64), (8, 16, 512, 64), (2, 16, 2048, 64)),
)
#: matrices, rows of x, columns of y, values that are reduced
_PRODUCTS = ((384, 128, 128, 32), (384, 128, 32, 128), (128, 512, 512, 64), (1, 2048, 1536, 384), (1, 1024, 4096, 4096))


@torch.no_grad()
def measured(device: str, spec: pt2mx.MXSpec, repeats: int, dtype: torch.dtype) -> Iterator[Row]:
    def quantized(*shape: int, axis: int = -1) -> Tensor:
        return pt2mx.fake_quantize_mx(torch.randn(shape, device=device), spec.replace(axis=axis))

    for batch, heads, tokens, width in _ATTENTIONS:
        operands = [quantized(batch, tokens, heads, width).transpose(1, 2) for _ in range(3)]
        seen = (torch.rand(batch, 1, 1, tokens, device=device) < 0.9).expand(batch, 1, tokens, tokens)
        for name, mask in (("attention", None), ("attention, masked", seen)):
            theirs = partial(_torch_attention, mask=mask)
            ours = partial(attend, mask=mask)
            times = _times(theirs, ours, operands, dtype, repeats)
            yield {"what": name, "size": f"{batch}x{heads}x{tokens}x{width}"} | times
    for matrices, m, n, k in _PRODUCTS if dtype == torch.float32 else ():
        operands = [quantized(matrices, m, k), quantized(matrices, n, k).mT]
        times = _times(torch.matmul, matmul_bfloat16, operands, dtype, repeats)
        yield {"what": "matmul", "size": f"{matrices}x{m}x{n}x{k}"} | times


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask)


def _times(
    theirs: Callable[..., Tensor], ours: Callable[..., Tensor], operands: list[Tensor], dtype: torch.dtype, repeats: int
) -> Row:
    on_gpu, plain = operands[0].is_cuda, dtype == torch.float32
    narrow = [x.bfloat16() for x in operands]
    own = partial(ours, *(operands if plain and not on_gpu else narrow), target_dtype=dtype)
    calls = [partial(theirs, *operands), partial(theirs, *narrow), own]
    run = [graph(call) for call in calls] if on_gpu else calls
    seconds = gpu_medians_in_turns(run, repeats) if on_gpu else medians_in_turns(run, repeats)
    exact, base = theirs(*(x.double() for x in operands)), 0 if plain else 1
    row: Row = {name: 1e3 * time for name, time in zip(("float32", "bfloat16", "ours"), seconds, strict=True)}
    row["ratio"] = seconds[2] / seconds[base]
    errors = {"error": relative_error(calls[base](), exact), "error of ours": relative_error(own(), exact)}
    return row | {name: f"{error:.1e}" for name, error in errors.items()}


if __name__ == "__main__":
    run_formats("tests.benchmarks.activation_matmuls", __doc__, measured, has_results_dtype=True)
