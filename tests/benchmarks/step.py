"""A step of `generate`: its time by this package's loop and by transformers', its kernels, and the limit of its bytes.

    python -m tests.benchmarks.step [--shapes 1b 3b 8b 70b] [--layers N] [--batches 1 4 16] [--slots 512] [--tokens 128]
        [--recipe mxfp4_weight_only] [--kv-cache mxfp8] [--device cuda] [--mode reduce-overhead] [--rounds 3]
        [--bandwidth GB/S] [--kernels 12]

A Llama of the shape of 3.2 1B or 3B, or 3.1 8B or 70B, random weights. Greedy text of random prompts that fills the
cache; on a GPU the model is compiled. The two loops generate in turns. A time is the median of the intervals between
two tokens that a streamer sees; the first ones of each text, in which graphs are recorded, do not count. `gap`: the
time of a step in which no kernel runs, under torch's profiler, which takes time itself: it compares the two loops. The
limit is the bytes of weights, scales and cache over a bandwidth, by default the bandwidth of a copy.
"""

import argparse
import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from pt2mx.algorithms import Rotation
from pt2mx.extras import import_extra
from tests.benchmarks.byte_limit import bytes_of_step, copy_bandwidth
from tests.benchmarks.language import SHAPES, llama
from tests.benchmarks.measure import Row, hardware, print_table

_streamers = import_extra("transformers.generation.streamers", "hf")

#: loop -> whether steps run as one function
LOOPS = {"one function": True, "transformers": False}
#: intervals of a text that do not count, and steps that are profiled
_SKIPPED, _PROFILED = 8, 16


class Clock(_streamers.BaseStreamer):  # type: ignore[name-defined]
    """The times at which tokens arrive. It profiles steps in the middle of a text."""

    def __init__(self, profiler: Any = None) -> None:
        self.times: list[float] = []
        self.profiler = profiler

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if self.profiler is not None and len(self.times) == _SKIPPED + 1:
            self.profiler.start()
        if self.profiler is not None and len(self.times) == _SKIPPED + 1 + _PROFILED:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.profiler.stop()

    def end(self) -> None:
        pass

    def intervals(self) -> list[float]:
        """Return the seconds of each step."""
        pairs = zip(self.times[_SKIPPED:], self.times[_SKIPPED + 1 :], strict=False)
        return [later - earlier for earlier, later in pairs]


def generate(model: LanguageModel, loop: str, prompt: torch.Tensor, tokens: int, profiler: Any = None) -> Clock:
    """Generate tokens by a loop."""
    clock = Clock(profiler)
    covers = LanguageModel._covers if LOOPS[loop] else lambda *arguments: False
    with mock.patch.object(LanguageModel, "_covers", covers):
        model.generate(prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None, streamer=clock)
    return clock


def kernels_of(profiler: Any, on_gpu: bool) -> tuple[list[Row], Row]:
    """Return the kernels of a profiled step by total time, and a row for the whole; on a CPU torch's operators."""
    times: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        if (event.device_type == DeviceType.CUDA) != on_gpu or event.is_user_annotation:
            continue
        # a CPU's operators call each other
        times[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        launches[event.name] += 1
        spans.append((event.time_range.start, event.time_range.end))
    rows: list[Row] = [
        {"kernel": name[:72], "us": times[name] / _PROFILED, "launches": launches[name] / _PROFILED}
        for name in sorted(times, key=lambda name: -times[name])
    ]
    gap, end = 0.0, spans[0][0]
    for start, last in sorted(spans):
        gap += max(start - end, 0)
        end = max(end, last)
    whole: Row = {
        "kernel us": sum(times.values()) / _PROFILED,
        "launches": launches.total() / _PROFILED,
        "gap us": gap / _PROFILED,
    }
    return rows, whole


def measured(model: LanguageModel, batch: int, options: argparse.Namespace, bandwidth: float) -> list[Row]:
    """Measure the loops in turns; print the kernels of a step; return a row for each loop."""
    prompt = torch.randint(model.config.vocab_size, (batch, options.slots - options.tokens), device=model.device)
    intervals: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    for repeat in range(options.rounds + 1):
        for loop, seconds in intervals.items():
            clock = generate(model, loop, prompt, options.tokens)
            seconds += clock.intervals() if repeat else []  # the first round compiles
    limit = 1e3 * bytes_of_step(model, batch, options.slots) / bandwidth
    rows: list[Row] = []
    on_gpu = model.device.type == "cuda"
    for loop, seconds in intervals.items():
        profiler = profile(activities=[ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU])
        generate(model, loop, prompt, options.tokens, profiler)
        kernels, whole = kernels_of(profiler, on_gpu)
        ms = 1e3 * statistics.median(seconds)
        row: Row = {"batch": batch, "loop": loop, "step ms": ms, **whole, "limit ms": limit, "share": limit / ms}
        rows.append(row)
        print(f"batch {batch}, {loop}: {ms:.3f} ms a step, {limit / ms:.0%} of the byte limit", flush=True)
        if LOOPS[loop]:
            print_table(kernels[: options.kernels], tuple(kernels[0]))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b"])
    parser.add_argument("--layers", type=int, help="of the models, for a shorter run")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--slots", type=int, default=512, help="of the cache, a multiple of 256; default: 512")
    parser.add_argument("--tokens", type=int, default=128, help="of each text, at least 30; default: 128")
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--kv-cache", help="the format of the cache; default: bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", help="of torch.compile for transformers' loop; default on a GPU: reduce-overhead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, help="of the memory, in GB/s; default: of a copy, measured")
    parser.add_argument("--kernels", type=int, default=12, help="to print of a step")
    options = parser.parse_args(arguments)
    bandwidth = 1e9 * options.bandwidth if options.bandwidth else copy_bandwidth(torch.device(options.device))
    print(f"{bandwidth / 1e9:.0f} GB/s", flush=True)
    for shape in options.shapes:
        quantizer = MXQuantizer.from_recipe(options.recipe).set_kv_cache(options.kv_cache)
        # of the algorithms, rotations alone change the time
        rotations = [one for one in quantizer.algorithms or () if isinstance(one, Rotation)]
        quantizer.set_algorithms(rotations or None)
        net = llama(shape, options.layers, options.device)
        texts = [torch.randint(net.config.vocab_size, (1, 32), device=net.device)] if rotations else []
        model = quantize_language_model(net, quantizer, texts)
        del net
        gc.collect()  # the float model
        mode = options.mode or ("reduce-overhead" if options.device == "cuda" else None)
        if mode is not None:
            model.compile(mode=mode)
        rows = [row for batch in options.batches for row in measured(model, batch, options, bandwidth)]
        print(f"\n{shape}, {model.config.num_hidden_layers} layers, {options.recipe}, {options.slots} slots")
        print_table(rows, tuple(rows[0]))
        del model
        gc.collect()
    print(hardware())


if __name__ == "__main__":
    main()
