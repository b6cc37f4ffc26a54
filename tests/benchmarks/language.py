"""Language models: seconds of the flow, time to the first token and tokens a second, against the float program.

    python -m tests.benchmarks.language [--shape 135m|1b|3b|8b|70b] [--device cuda] [--recipe mxfp4_weight_only]
        [--layers N] [--prompts 512 4096] [--batches 1 4 16] [--slots 512] [--kv-cache mxfp8] [--mode reduce-overhead]
        [--side both|bfloat16|quantized] [--bandwidth GB/S]

A Llama of the shape of SmolLM2-135M, of 3.2 1B or 3B, or of 3.1 8B or 70B, random weights in bfloat16, exported with
its cache. Both sides are the same program, compiled alike, and called by `LanguageModel`, so the figures include
Python's time between two steps. Each figure is the median of calls after two warm-up calls. Next to it is the byte
limit: the bytes of weights, scales and cache over the bandwidth of the memory, by default the bandwidth of a copy.
Under `torchrun --nproc-per-node N -m ...` the layers are divided among the ranks.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from pt2mx.extras import import_extra
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.decoder import export_decoder
from pt2mx.pt2e.language.tensor_parallel import shard
from tests.benchmarks.byte_limit import bytes_of_step, copy_bandwidth
from tests.benchmarks.measure import Row, hardware, print_table

#: shape -> fields of a LlamaConfig
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
VOCABULARY, LONGEST = 128256, 8192


def config_of(shape: str, layers: int | None, **fields: object) -> Any:
    """Return the configuration of a Llama of a shape; `layers` and `fields` replace its own."""
    sizes = {"vocab_size": VOCABULARY, **SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
    return import_extra("transformers", "hf").LlamaConfig(**{**sizes, "max_position_embeddings": LONGEST, **fields})


def llama(shape: str, layers: int | None, device: str) -> Any:
    transformers, config = import_extra("transformers", "hf"), config_of(shape, layers)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def measured(
    model: LanguageModel, name: str, options: argparse.Namespace, bandwidth: float
) -> dict[str, tuple[float, float]]:
    """Measure the milliseconds to a prompt's first token and of a step, and print each at once.

    Returns:
        Name of a measurement -> its milliseconds, and its byte limit in milliseconds.
    """
    model.compile(**({"mode": options.mode} if options.mode else {}))
    times: dict[str, tuple[float, float]] = {}

    def measure(what: str, call: Callable[[], object], repeats: int, batch: int, slots: int) -> None:
        ms, limit = _milliseconds(call, repeats), 1e3 * bytes_of_step(model, batch, slots) / bandwidth
        times[what] = ms, limit
        print(f"{name}: {what}: {ms:.2f} ms, {limit / ms:.0%} of the byte limit, {limit:.3f} ms", flush=True)

    with torch.no_grad():
        for batch in options.batches:
            cache = model.new_cache(batch, options.slots)
            for layer in cache.layers:  # the last ones are free
                layer.length = options.slots - 64
            token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
            call = partial(model, token, past_key_values=cache)
            measure(f"step, batch {batch}", call, 50, batch, options.slots)
        for length in options.prompts:
            ids = torch.randint(model.config.vocab_size, (1, length), device=model.device)
            call = partial(_first_token, model, ids, model.new_cache(1, length))
            measure(f"first token, {length}", call, 5, 1, length)
    return times


def _first_token(model: LanguageModel, ids: torch.Tensor, cache: Any) -> None:
    cache.reset()
    model(ids, past_key_values=cache, logits_to_keep=1)


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        _synchronize()
        begin = time.perf_counter()
        call()
        _synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[2:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="of the model, for a shorter run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--side", choices=("both", "bfloat16", "quantized"), default="both", help="what is timed")
    parser.add_argument("--slots", type=int, default=512, help="of the cache that a step reads; default: 512")
    parser.add_argument("--kv-cache", help="the format of the quantized side's cache; default: bfloat16")
    parser.add_argument("--mode", help="of torch.compile, for single tokens")
    parser.add_argument("--bandwidth", type=float, help="of the memory, in GB/s; default: of a copy, measured")
    options = parser.parse_args(arguments)
    if torch.distributed.is_torchelastic_launched():
        ranks.join(int(os.environ["WORLD_SIZE"]))
    with ranks.only_first_prints():
        run(options)


def run(options: argparse.Namespace) -> None:
    """Quantize, compile and time the model, or this rank's part of it."""
    bandwidth = 1e9 * options.bandwidth if options.bandwidth else copy_bandwidth(torch.device(options.device))
    print(f"{bandwidth / 1e9:.0f} GB/s", flush=True)
    model = llama(options.shape, options.layers, options.device)
    if torch.distributed.is_initialized():
        model = shard(model)
        gc.collect()  # the whole one
    size, times = sum(p.nbytes for p in model.parameters()), {}
    begin = time.perf_counter()

    def stage(name: str) -> None:
        times[name] = time.perf_counter()

    quantizer = MXQuantizer.from_recipe(options.recipe).set_kv_cache(options.kv_cache)
    quantized = quantize_language_model(model, quantizer, stage=stage)
    _synchronize()
    ends = [*list(times.values())[1:], time.perf_counter()]
    print(f"{size / 1e9:.2f} GB, " + ", ".join(f"{n} {e - times[n]:.1f} s" for n, e in zip(times, ends, strict=True)))
    print(f"{time.perf_counter() - begin:.1f} s in all")
    sides = {}
    if options.side != "quantized":
        sides["bfloat16"] = LanguageModel(export_decoder(model), quantized.config)
    if options.side != "bfloat16":
        sides[options.recipe] = quantized
    del model, quantized
    measurements = []
    for name in list(sides):
        side = sides.pop(name)
        measurements.append(measured(side, name, options, bandwidth))
        del side
        gc.collect()
    if options.side == "both":
        exact, mx = measurements
        rows: list[Row] = []
        for what, (ms, limit) in exact.items():
            mx_ms, mx_limit = mx[what]
            row: Row = {"": what, "bfloat16 ms": ms, "limit ms": limit, "share": limit / ms}
            rows.append(row | {"mx ms": mx_ms, "mx limit": mx_limit, "mx share": mx_limit / mx_ms, "times": ms / mx_ms})
        print_table(rows, tuple(rows[0]))
    print(hardware())


if __name__ == "__main__":
    main()
