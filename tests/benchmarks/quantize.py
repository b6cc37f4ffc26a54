"""fake_quantize_mx, quantize_mx, dequantize_mx and rotation over a plain copy of the tensor, and their peers.

    python -m tests.benchmarks.quantize [--device cpu|cuda] [--size 4096] [--repeats 15] [--json]

On the CPU each row is the time over `x.clone()` in float32, each repetition next to one of the copy. glibc's allocator
is told to keep its heap (the script starts itself again for that): page faults of fresh memory would hide everything.
On a GPU it is the share of the bandwidth of a device copy, bytes in and out counted, in bfloat16.
"""

import argparse
import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import pt2mx
from pt2mx import FORMATS, ops
from pt2mx.kernels import reference_chunked
from pt2mx.ops.quantization import Dequantize, FakeQuantize, Quantize
from tests.benchmarks.measure import Row, gpu_medians_in_turns, keep_heap, medians_in_turns, report, timed

_BLOCK = 32
#: values that are rotated together
_ROTATION = 32

_HEADER = ("device", "what", "layout", "fake_quantize", "quantize", "dequantize", "rotated_fake_quantize", "hadamard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all there are")
    parser.add_argument("--size", type=int, help="of a square tensor; default: 4096 on the CPU, 16384 on a GPU")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    keep_heap("tests.benchmarks.quantize")
    logging.disable(logging.CRITICAL)  # of peers that do not compile
    rows: list[Row] = []
    if args.device != "cuda":
        rows += cpu_rows(args.size or 4096, args.repeats)
    if args.device == "cuda" or (args.device is None and torch.cuda.is_available()):
        rows += gpu_rows(args.size or 16384, args.repeats)
    report(rows, _HEADER, args.json)


def calls_of(x: Tensor, spec: pt2mx.MXSpec) -> dict[str, tuple[Callable[[], object], int]]:
    """Return operation -> its call, and the bytes that it reads and writes."""
    t = pt2mx.tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    quantize = Quantize(x, spec, tensor_scale=t).args
    scale, data = ops.quantize_mx(*quantize)
    dequantize = Dequantize(data, scale, spec, x.dtype, tensor_scale=t).args
    both, packed = 2 * x.nbytes, x.nbytes + scale.nbytes + data.nbytes
    calls = {
        "fake_quantize": (partial(ops.fake_quantize_mx, *FakeQuantize(x, spec, None, "identity", t).args), both),
        "quantize": (partial(ops.quantize_mx, *quantize), packed),
        "dequantize": (partial(ops.dequantize_mx, *dequantize), packed),
    }
    if x.dim() == 2 and spec.axis == -1 and spec.has_plain_scale:
        modes = spec.element.name, spec.block_size, spec.scale_mode, spec.rounding
        calls["rotated_fake_quantize"] = partial(torch.ops.pt2mx.rotated_fake_quantize_mx, x, _ROTATION, *modes), both
    return calls


# ---- CPU ----


def cpu_rows(size: int, repeats: int) -> list[Row]:
    """Times over the time of x.clone(): our kernels for every format and layout, then the peers."""
    x = torch.randn(size, size)
    images = x.view(16, size // 16, -1, 64)
    layouts = {
        "axis -1": (x, -1),
        "axis 0": (x, 0),
        "NCHW, C": (images, 1),
        "NHWC, C": (images.contiguous(memory_format=torch.channels_last), 1),
    }
    rows = []
    for name in FORMATS:
        for layout, (values, axis) in layouts.items():
            row: Row = {"device": "cpu", "what": f"pt2mx {name}", "layout": layout}
            calls = calls_of(values, pt2mx.MXSpec(name, _BLOCK, axis))
            rows.append(row | {operation: over_clone(call, values, repeats) for operation, (call, _) in calls.items()})
    for dtype in (torch.float32, torch.bfloat16):
        values = x.to(dtype)
        took = over_clone(lambda v=values: torch.ops.pt2mx.hadamard(v, _ROTATION, -1), values, repeats)
        rows.append({"device": "cpu", "what": f"rotation, {dtype}", "layout": "axis -1", "hadamard": took})
    for name in FORMATS:
        for peer, call in peers(x, name):
            row = {"device": "cpu", "what": f"{peer} {name}", "layout": "axis -1"}
            try:
                call()  # compiles
                slow = timed(call) > 0.5
                row["fake_quantize"] = over_clone(call, x, 3 if slow else repeats)
            except torch._inductor.exc.InductorError:
                row["fake_quantize"] = "does not compile"
            rows.append(row)
    return rows


def over_clone(call: Callable[[], object], x: Tensor, repeats: int) -> float:
    """Return the median time of `call` over the time of x.clone(). Both take turns, so that other load affects both."""
    ours, copy = medians_in_turns([call, x.clone], repeats)
    return ours / copy


def peers(x: Tensor, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the other libraries' fake quantizations of x along its last axis."""
    spec = pt2mx.MXSpec(name, _BLOCK, x.dim() - 1)
    yield "reference, in slices,", lambda: reference_chunked.fake_quantize(x, spec, None)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: pt2mx.fake_quantize_mx(x, name, _BLOCK))
    yield "reference through Inductor,", lambda: compiled(x)
    torchao = torchao_functions(name)
    if torchao is not None:
        _, fake_quantize = torchao
        yield "torchao eager", lambda: fake_quantize(x)
        compiled_torchao = torch.compile(fake_quantize)
        yield "torchao compiled", lambda: compiled_torchao(x)


def torchao_functions(name: str) -> tuple[Callable, Callable] | None:
    """torchao's quantize and fake_quantize along the last axis, None where torchao or the format is missing."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
    except ImportError:
        return None
    dtype = {
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp6_e2m3": "fp6_e2m3",
        "fp6_e3m2": "fp6_e3m2",
        "fp4_e2m1": torch.float4_e2m1fn_x2,
    }.get(name)
    if dtype is None:
        return None

    def fake_quantize(x: Tensor) -> Tensor:
        return MXTensor.to_mx(x, dtype, _BLOCK).dequantize(x.dtype)

    return lambda x: to_mx(x, dtype, _BLOCK), fake_quantize


# ---- GPU ----


def gpu_rows(size: int, repeats: int) -> list[Row]:
    """Shares of the bandwidth of a device copy: our kernels for every format, then the peers."""
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    copy = torch.empty_like(x)

    def row(what: str, layout: str, calls: dict[str, tuple[Callable[[], object], int]]) -> Row:
        timed_calls = [lambda: copy.copy_(x), *(call for call, _ in calls.values())]
        copying, *seconds = gpu_medians_in_turns(timed_calls, repeats)
        bandwidth = 2 * x.nbytes / copying
        shares = {op: calls[op][1] / each / bandwidth for op, each in zip(calls, seconds, strict=True)}
        return {"device": "cuda", "what": what, "layout": layout, **shares}

    images = x.view(16, size // 16, -1, 64).contiguous(memory_format=torch.channels_last)
    layouts = {"axis -1": (x, -1), "axis 0": (x, 0), "NHWC, C": (images, 1)}
    rows = []
    specs = {name: pt2mx.MXSpec(name, _BLOCK) for name in FORMATS} | {"nvfp4": pt2mx.parse("nvfp4")}
    for name, spec in specs.items():
        for layout, (values, axis) in layouts.items():
            rows.append(row(f"pt2mx {name}", layout, calls_of(values, spec.replace(axis=axis))))
    rows.append(
        row("rotation", "axis -1", {"hadamard": (lambda: torch.ops.pt2mx.hadamard(x, _ROTATION, -1), 2 * x.nbytes)})
    )
    for name in ("fp8_e4m3", "fp4_e2m1"):
        torch._dynamo.reset()
        inductor = torch.compile(lambda x, name=name: pt2mx.fake_quantize_mx(x, name, _BLOCK))
        calls = {"fake_quantize": (lambda f=inductor: f(x), 2 * x.nbytes)}
        rows.append(row(f"reference through Inductor, {name}", "axis -1", calls))
        if torchao := torchao_functions(name):
            quantize, fake_quantize = map(torch.compile, torchao)
            packed = sum(part.nbytes for part in ops.quantize_mx(x, name, _BLOCK, -1, "floor", "even"))
            calls = {
                "fake_quantize": (lambda f=fake_quantize: f(x), 2 * x.nbytes),
                "quantize": (lambda f=quantize: f(x), x.nbytes + packed),
            }
            rows.append(row(f"torchao compiled {name}", "axis -1", calls))
    return rows


if __name__ == "__main__":
    main()
