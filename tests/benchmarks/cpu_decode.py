"""Tokens a second of a language model on the CPU, next to llama.cpp's in turns.

    python -m tests.benchmarks.cpu_decode [--shape 1b] [--recipes mxfp4_weight_only decoder_cpu] [--tokens 32]
        [--threads N] [--repeats 5] [--llama-bench PATH] [--peers Q4_0 MXFP4] [--gguf FILE ...] [--prompt 0]

A Llama of the shape with random weights, quantized by each recipe and compiled, generates tokens greedily.
`--llama-bench` names a llama-bench of llama.cpp. Its side is a model of that shape with random codes (`--peers`), or
the files of `--gguf`. `GB/s` counts the bytes of the weights and of the cache that a token reads, and `share` is GB/s
over the bandwidth of a sum of int64 values. All sides take turns, and a figure is a median. With `--prompt`, the
table has the tokens a second of a prompt of that many tokens, too.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from tests.benchmarks import language
from tests.benchmarks.byte_limit import bytes_of_step
from tests.benchmarks.measure import Row, hardware, keep_heap, print_table, timed
from tests.benchmarks.random_gguf import write_random_llama

#: values of the sum that measures the bandwidth
_SUMMED = 1 << 26

#: the end of every error about the program of llama.cpp
_WANTED = "give --llama-bench a llama-bench of llama.cpp that runs here and reads the files of --peers or --gguf"

#: what a side measures: seconds a token, seconds a token of a prompt
Times = tuple[float, float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=language.SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="of the model, for a shorter run")
    parser.add_argument("--recipes", nargs="+", default=["mxfp4_weight_only", "decoder_cpu"])
    parser.add_argument("--tokens", type=int, default=32, help="that a turn generates; default: 32")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that is timed; default: none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llama-bench", type=Path, help="the program of llama.cpp")
    parser.add_argument("--peers", nargs="*", default=["Q4_0", "MXFP4"], help="types of random GGUF files")
    parser.add_argument("--gguf", nargs="*", type=Path, default=[], help="files instead of random ones")
    options = parser.parse_args(arguments)
    for file in (options.llama_bench, *options.gguf):
        if file is not None and not file.is_file():
            parser.error(f"no file {file}")
    if options.llama_bench:
        _printed_by(options.llama_bench, "--help")  # a program that cannot run ends this one before models are made
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))


@torch.no_grad()
def run(options: argparse.Namespace, folder: Path) -> None:
    """Make all sides, measure them in turns, and print a table."""
    sides: dict[str, Callable[[], Times]] = {}
    bytes_read: dict[str, int] = {}
    slots = options.tokens + max(options.prompt, 1)
    for recipe in options.recipes:
        model = language.llama(options.shape, options.layers, "cpu")
        quantizer = MXQuantizer.from_recipe(recipe).set_algorithms(None)  # of random weights
        config = model.config
        quantized = quantize_language_model(model, quantizer, [torch.randint(config.vocab_size, (1, 16))])
        del model
        quantized.compile()
        sides[recipe] = partial(_generate, quantized, options.tokens, options.prompt)
        bytes_read[recipe] = bytes_of_step(quantized, 1, slots)
    if options.llama_bench:
        files = list(options.gguf)
        for kind in () if files else options.peers:
            files.append(folder / f"{kind}.gguf")
            write_random_llama(files[-1], kind, config)
        for file in files:
            name = f"llama.cpp {file.stem}"
            sides[name] = partial(_run_llama_bench, options, file)
            bytes_read[name] = file.stat().st_size
    integers = torch.ones(_SUMMED, dtype=torch.int64)
    rounds, reads = [], []
    for _ in range(options.repeats + 1):
        reads.append(integers.nbytes / timed(integers.sum))
        rounds.append([call() for call in sides.values()])
    bandwidth = statistics.median(reads[1:])
    rows: list[Row] = []
    for name, measured in zip(sides, zip(*rounds[1:], strict=True), strict=True):
        token, of_prompt = (statistics.median(times) for times in zip(*measured, strict=True))
        speed = bytes_read[name] / token
        row: Row = {"": name, "tokens/s": 1 / token, "ms": 1e3 * token, "GB/s": speed / 1e9}
        row |= {"share": speed / bandwidth}
        rows.append(row | ({f"prompt of {options.prompt}, tokens/s": 1 / of_prompt} if options.prompt else {}))
    print_table(rows, tuple(rows[0]))
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s; {hardware()}")


def _generate(model: LanguageModel, tokens: int, prompt: int) -> Times:
    def seconds(length: int, new: int) -> float:
        ids = torch.randint(model.config.vocab_size, (1, length))
        call = partial(model.generate, ids, max_new_tokens=new, eos_token_id=None, do_sample=False)
        return timed(call)

    return seconds(1, tokens) / tokens, seconds(prompt, 1) / prompt if prompt else 0.0


def _run_llama_bench(options: argparse.Namespace, file: Path) -> Times:
    command = [options.llama_bench, "-m", file, "-t", options.threads, "-r", 1, "-o", "json"]
    text = _printed_by(*command, "-n", options.tokens, "-p", options.prompt)
    try:
        speeds = {bool(test["n_gen"]): 1 / test["avg_ts"] for test in json.loads(text)}
        return speeds[True], speeds.get(False, 0.0)
    except (ValueError, TypeError, KeyError):
        raise SystemExit(f"{options.llama_bench} printed no times of {file.name}: {_WANTED}") from None


def _printed_by(program: Path, *arguments: object) -> str:
    """Return what a llama-bench prints. Where it fails, end this process with one line that says how."""
    command = [program.absolute(), *map(str, arguments)]  # a name without a folder would be looked for on PATH
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise SystemExit(f"cannot run {program} ({error.strerror}): {_WANTED}") from None
    if code := done.returncode:
        ended = f"signal {-code}" if code < 0 else f"exit status {code}"
        *_, reason = ["no message", *done.stderr.strip().splitlines()]
        raise SystemExit(f"{program} ended with {ended} ({reason}): {_WANTED}")
    return done.stdout


if __name__ == "__main__":
    keep_heap("tests.benchmarks.cpu_decode")
    main()
