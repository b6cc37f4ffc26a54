"""linear_mx over bfloat16 F.linear of the same shape, next to other matmuls with a packed weight.

    python -m tests.benchmarks.linear [--device cpu|cuda] [--n 8192] [--k 4096] [--m 1 4 16 ...] [--repeats 15] [--json]

Each number is a speed-up: the time of `F.linear(x, weight)` in bfloat16 over the time of the call. `limit` is the
largest speed-up from fewer bytes: the bytes of the bfloat16 weight over the bytes of the packed one. Weights take turns
among copies that together exceed the last-level cache (--cache MB), and both sides take turns. On the CPU the allocator
keeps its heap; on a GPU a graph holds eight calls, each with the next copy.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import FORMATS, dequantize_mx, ops, parse
from pt2mx.kernels.float_scales import tensor_scale
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.ops.linear import LinearMX, linear_mx, linear_mx_mma_layout
from pt2mx.ops.quantization import Quantize
from tests.benchmarks.measure import Row, gpu_medians_in_turns, keep_heap, medians_in_turns, report

_BLOCK = 32
_BATCHES = {"cpu": (1, 4, 16, 64, 256, 1024), "cuda": (1, 4, 16, 64, 256, 1024, 2048)}
_K = {"cpu": 4096, "cuda": 8192}
#: elements for which the peers are measured
_PEERS = ("fp4_e2m1", "fp8_e4m3")

#: x and the number of a copy of the weight -> the matmul
Matmul = Callable[[Tensor, int], Tensor]


@dataclass
class Candidate:
    what: str
    element: str
    matmul: Matmul
    limit: float  # bytes of the bfloat16 weight over bytes of this one
    dtype: torch.dtype = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all there are")
    parser.add_argument("--n", type=int, default=8192, help="rows of the weight")
    parser.add_argument("--k", type=int, help="values of a row; default: 4096 on the CPU, 8192 on a GPU")
    parser.add_argument("--m", type=int, nargs="+", help="rows of x")
    parser.add_argument(
        "--cache", type=int, default=512, help="MB that the copies of a weight take together; default: 512"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    keep_heap("tests.benchmarks.linear")
    logging.disable(logging.CRITICAL)  # of peers that do not compile
    devices = [args.device] if args.device else ["cpu", *["cuda"] * torch.cuda.is_available()]
    rows = [row for device in devices for row in device_rows(device, args)]
    batches = dict.fromkeys(m for device in devices for m in args.m or _BATCHES[device])
    report(rows, ("device", "what", "element", "x", "limit", *(f"M={m}" for m in batches)), args.json)


def device_rows(device: str, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each way of multiplying, with its speed-up for each M."""
    n, k = args.n, args.k or _K[device]
    seconds = {"cpu": cpu_seconds, "cuda": graph_seconds}[device]
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    dense = copies([weight], args.cache)
    for candidate in candidates(weight, args.cache):
        row: Row = {"device": device, "what": candidate.what, "element": candidate.element}
        row |= {"x": str(candidate.dtype).removeprefix("torch."), "limit": candidate.limit}
        for m in args.m or _BATCHES[device]:
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            cast = x.to(candidate.dtype)
            baseline: Matmul = lambda x, i: F.linear(x, dense[i % len(dense)][0])  # noqa: E731
            try:
                plain, ours = seconds([(baseline, x), (candidate.matmul, cast)], args.repeats)
                row[f"M={m}"] = plain / ours
            except Exception as error:  # of peers: each has its own kinds
                if candidate.what.startswith("linear_mx"):
                    raise
                row[f"M={m}"] = type(error).__name__
        yield row


def candidates(weight: Tensor, cache: int) -> Iterator[Candidate]:
    """Ours for every element, and for NVFP4 (FP4 in blocks of 16 with E4M3 scales), then the peers."""
    for name in (*FORMATS, "nvfp4"):
        spec = parse(name, axis=1)
        own = tensor_scale(weight, spec) if spec.scale_format.tensor else None
        packed = copies(ops.quantize_mx(*Quantize(weight, spec, tensor_scale=own).args)[::-1], cache)
        limit = weight.nbytes / sum(part.nbytes for part in packed[0])
        options = LinearMX(weight, *packed[0], None, spec, 0, None, own).args[3:]

        def ours(x: Tensor, i: int, packed: list = packed, options: tuple = options) -> Tensor:
            return linear_mx(x, *packed[i % len(packed)], *options)

        if weight.device.type == "cpu":
            yield Candidate("linear_mx", name, ours, limit)
            yield Candidate("linear_mx", name, ours, limit, torch.float32)
        else:  # as lowering stores a weight on a GPU
            stored = copies(to_mma_layout(*packed[0], spec), cache)
            modes = None, spec.element.name, len(weight), 0, own

            def lowered(x: Tensor, i: int, parts: list = stored, modes: tuple = modes) -> Tensor:
                return linear_mx_mma_layout(x, *parts[i % len(parts)], *modes)

            yield Candidate("linear_mx_mma_layout", name, lowered, limit)
        if name in _PEERS:
            torch._dynamo.reset()
            expression = torch.compile(inductor_expression(name, weight.shape[1]))

            def inductor(x: Tensor, i: int, f: Callable = expression, packed: list = packed) -> Tensor:
                return f(x, *packed[i % len(packed)])

            yield Candidate("Inductor on the plain expression", name, inductor, limit)
    yield from torchao_candidates(weight, cache)


def inductor_expression(name: str, k: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def expression(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, dequantize_mx(data, scale, name, _BLOCK, x.dtype, length=k))

    return expression


def torchao_candidates(weight: Tensor, cache: int) -> Iterator[Candidate]:
    """torchao's weight-only int8, compiled as its documentation says."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        return
    modules = []
    for (copy,) in copies([weight], cache):
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        module.weight = torch.nn.Parameter(copy, requires_grad=False)
        quantize_(module, Int8WeightOnlyConfig(version=2))
        modules.append(module)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, weight: F.linear(x, weight))
    yield Candidate("torchao weight-only", "int8", lambda x, i: compiled(x, modules[i % len(modules)].weight), 2.0)


def copies(parts: Sequence[Tensor], cache: int) -> list[tuple[Tensor, ...]]:
    """Enough copies of `parts` that together they take `cache` MB; two at least."""
    count = max(2, -(-cache * 2**20 // sum(part.nbytes for part in parts)))
    return [tuple(part.clone() for part in parts) for _ in range(count)]


def cpu_seconds(calls: Sequence[tuple[Matmul, Tensor]], repeats: int) -> list[float]:
    turns = [iter(range(10**9)) for _ in calls]
    with torch.no_grad():
        return medians_in_turns(
            [lambda f=f, x=x, turn=turn: f(x, next(turn)) for (f, x), turn in zip(calls, turns, strict=True)], repeats
        )


def graph_seconds(calls: Sequence[tuple[Matmul, Tensor]], repeats: int) -> list[float]:
    """Median time of one matmul, in a CUDA graph that holds eight, each with the next copy of the weight."""
    return [seconds / 8 for seconds in gpu_medians_in_turns([captured(f, x, 8) for f, x in calls], repeats)]


@torch.no_grad()
def captured(matmul: Matmul, x: Tensor, count: int) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and tunes
        for _ in range(3):
            for i in range(count):
                matmul(x, i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            matmul(x, i)
    return graph.replay


if __name__ == "__main__":
    main()
