"""Time attention over quantized values whose result is quantized too: in a separate call, and in attention's kernel.

    python -m tests.benchmarks.quantized_attention [--device cuda] [--format mxfp8] [--results bfloat16] [--repeats 20]

Milliseconds, in turns, on a GPU as CUDA graphs: attention alone, attention and then the kernel that quantizes, and one
call of `attention_bfloat16` for both. Both give the same values, in bfloat16.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import pt2mx
from pt2mx.ops.activations import activation_fake_quantize_mx
from tests.attention import attend
from tests.benchmarks.attention import graph
from tests.benchmarks.measure import Row, gpu_medians_in_turns, medians_in_turns, run_formats

#: sequences, heads, tokens, values of a head: MiniLM, BERT-large, longer ones
_SIZES = ((32, 12, 64, 32), (32, 16, 128, 64), (8, 16, 512, 64), (8, 16, 512, 128))


@torch.no_grad()
def measured(device: str, spec: pt2mx.MXSpec, repeats: int, dtype: torch.dtype) -> Iterator[Row]:
    modes = spec.element.name, spec.block_size, spec.scale_mode, spec.rounding, torch.bfloat16
    for batch, heads, tokens, width in _SIZES:
        values = [torch.randn(batch, tokens, heads, width, device=device) for _ in range(3)]
        operands = [pt2mx.fake_quantize_mx(x, spec).transpose(1, 2) for x in values]
        narrow = operands if device == "cpu" and dtype == torch.float32 else [x.bfloat16() for x in operands]
        alone = partial(attend, *narrow, target_dtype=dtype)
        one_call = partial(attend, *narrow, None, False, None, dtype, *modes)
        calls = [alone, partial(_two_calls, alone, modes), one_call]
        assert torch.equal(calls[1](), calls[2]())
        run = [graph(call) for call in calls] if device == "cuda" else calls
        alone_s, two, one = (gpu_medians_in_turns if device == "cuda" else medians_in_turns)(run, repeats)
        times = {"alone": 1e3 * alone_s, "two calls": 1e3 * two, "one": 1e3 * one, "ratio": one / two}
        yield {"size": f"{batch}x{heads}x{tokens}x{width}"} | times


def _two_calls(attention: partial[Tensor], modes: tuple) -> Tensor:
    return activation_fake_quantize_mx(attention().transpose(1, 2), "none", *modes).transpose(1, 2)


if __name__ == "__main__":
    run_formats("tests.benchmarks.quantized_attention", __doc__, measured, has_results_dtype=True)
