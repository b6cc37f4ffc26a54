"""The time of a training step with quantized gradients, or with an accumulator, over that of plain
quantization-aware training.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.gradients [--tokens 512] [--width 512] [--repeats 5] [--compile]
        [--device cuda] [--rows plain "hopper{32,128}" ...]

Forward and backward pass of a gated MLP and fused attention of `--width` features, weights and activations in MXFP8.
The steps take turns. On a CPU their times are those of the processor, which other processes change less than the
clock's.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import pt2mx
from tests.benchmarks.measure import Row, keep_heap, medians_in_turns, report

#: row -> fields of the config, beside the formats of weights and activations; None: the float model
STEPS: dict[str, dict[str, object] | None] = {
    "float32": None,
    "plain": {},
    "mxfp8_e5m2": {"gradient": "mxfp8_e5m2"},
    "mxfp4(stochastic)": {"gradient": "mxfp4(stochastic)"},
    "mxfp8_e5m2, hadamard 32": {"gradient": "mxfp8_e5m2", "gradient_hadamard": 32},
    **{text: {"accumulator": text} for text in ("bfloat16{32,row}", "fixed(8,16){32,row}", "hopper{32,128}")},
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)  # (B, heads, T, 64)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


def measured(options: argparse.Namespace) -> list[Row]:
    """Return a row for each of `--rows`."""
    torch.manual_seed(0)
    x = torch.randn(4, options.tokens // 4, options.width, device=options.device)
    exported = torch.export.export(Layer(options.width).to(options.device), (x,)).module()
    steps = [_step(exported, x, STEPS[name], options.compile) for name in options.rows]
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    medians = medians_in_turns(steps, options.repeats, clock=clock)
    plain = medians[options.rows.index("plain")]
    times = zip(options.rows, medians, strict=True)
    return [{"config": name, "ms": 1e3 * seconds, "over plain": seconds / plain} for name, seconds in times]


def _step(exported: nn.Module, x: Tensor, how: dict[str, object] | None, compiles: bool) -> Callable[[], None]:
    model = exported
    if how is not None:
        config = pt2mx.MXQuantizationConfig("mxfp8", "mxfp8", **how)
        model = pt2mx.prepare_qat_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
    call = torch.compile(model) if compiles else model

    def step() -> None:
        call(x).square().mean().backward()
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def main() -> None:
    keep_heap("tests.benchmarks.gradients")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", choices=STEPS, default=list(STEPS), metavar="ROW", help="with `plain`")
    report(measured(parser.parse_args()))


if __name__ == "__main__":
    main()
