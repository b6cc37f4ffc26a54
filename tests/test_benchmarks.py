"""The benchmarks of a step of decoding, on tiny models on the CPU."""

import argparse
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig

from pt2mx import MXQuantizer
from tests.benchmarks import byte_limit, continued, cpu_decode, language, qat, qat_slices, slices, step
from tests.benchmarks.accuracy import coder, digits, efficientnet, packages, smollm2, texts
from tests.benchmarks.random_gguf import write_random_llama
from tests.language_models import quantized_decoder, tiny_decoder, tokenizer_of_bytes

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.compiled
def test_the_bytes_of_a_step():
    for tied in (False, True):
        model = quantized_decoder(
            "llama", MXQuantizer.from_recipe("mxfp4_weight_only"), num_hidden_layers=1, tie_word_embeddings=tied
        )
        linear = 64 * (64 + 2 * 32 + 64 + 3 * 96 + 300)  # the table of embeddings counts where it is the head
        weights = linear // 2 + linear // 32
        others = 4 * (3 * 64 + 8)  # norms and the frequencies of RoPE
        assert byte_limit.bytes_of_step(model, 3, 512) == weights + others + 3 * 512 * 2 * 32 * 4


def test_crops_of_pictures(monkeypatch):
    """A picture of one color gives crops of one color each; mixed ones have several."""
    colors = {"red.png": (255.0, 0.0, 0.0), "gray.png": (128.0, 128.0, 128.0)}
    monkeypatch.setattr(
        efficientnet, "_read", lambda name: torch.tensor(colors[name])[:, None, None].expand(3, 300, 400)
    )
    monkeypatch.setattr(efficientnet, "_SEEN", tuple(colors))
    crops = efficientnet.crops(tuple(colors), 8, 0, 224)
    assert crops.shape == (8, 3, 224, 224) and torch.equal(crops, efficientnet.crops(tuple(colors), 8, 0, 224))
    assert crops.std((2, 3)).max() < 1e-5 and -1 <= crops.min() and crops.max() <= 1.01
    assert (crops[::2, 0] > crops[::2, 1] + 0.5).all() and torch.equal(crops[1::2, 0], crops[1::2, 1])
    mixed = efficientnet.blended(8, 0, 224)
    assert mixed.shape == crops.shape and mixed.abs().max() <= 1 and mixed.std((2, 3)).max() > 0.1


def test_the_bandwidth_of_a_copy(monkeypatch):
    monkeypatch.setitem(byte_limit._COPIED, "cpu", 1 << 22)
    assert 1e8 < byte_limit.copy_bandwidth(torch.device("cpu")) < 1e13


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(language.SHAPES, "1b", {**TINY, "num_hidden_layers": 2})
    monkeypatch.setattr(language, "VOCABULARY", 300)


@pytest.mark.slow
def test_a_step_of_a_tiny_model(tiny, capsys):
    step.main(
        ["--shapes", "1b", "--layers", "1", "--batches", "1", "2", "--slots", "256", "--tokens", "30", "--rounds", "1"]
        + ["--bandwidth", "10", "--device", "cpu"]
    )
    text = capsys.readouterr().out
    rows = [re.split("  +", line) for line in text[text.index("\nbatch  loop") :].splitlines()[1:6]]
    header, *rows = rows[:5]
    assert header == ["batch", "loop", "step ms", "kernel us", "launches", "gap us", "limit ms", "share"]
    assert [row[:2] for row in rows] == [[b, loop] for b in "12" for loop in step.LOOPS]
    for row in rows:
        ms, _, launches, _, limit, share = map(float, row[2:])
        assert ms > 0 and launches > 10 and abs(share / (limit / ms) - 1) < 0.02
    assert "10 GB/s" in text and "pt2mx::linear_mx" in text


@pytest.mark.slow
def test_a_tiny_language_model(tiny, capsys, compiler):
    language.main(["--layers", "1", "--batches", "2", "--slots", "256", "--prompts", "16", "--bandwidth", "10"])
    text = capsys.readouterr().out
    header, *rows = [re.split("  +", line) for line in text[text.index("bfloat16 ms") :].splitlines()[:3]]
    assert header == ["bfloat16 ms", "limit ms", "share", "mx ms", "mx limit", "mx share", "times"]
    assert [row[0] for row in rows] == ["step, batch 2", "first token, 16"]
    for row in rows:
        ms, limit, share, mx_ms, mx_limit, mx_share, times = map(float, row[1:])
        assert mx_limit < limit
        for ratio, expected in ((share, limit / ms), (mx_share, mx_limit / mx_ms), (times, ms / mx_ms)):
            assert abs(ratio / expected - 1) < 0.02


@pytest.fixture
def llama_bench(tmp_path):
    """Return a function that writes a shell script to use as llama-bench."""

    def write(text, mode=0o755):
        program = tmp_path / "llama-bench"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(mode)
        return program

    return write


@pytest.mark.slow
def test_a_model_next_to_llama_cpp(tiny, llama_bench, capsys, compiler):
    tests = [{"n_gen": 4, "avg_ts": 80.0}, {"n_gen": 0, "avg_ts": 500.0}]
    program = llama_bench(f"test $1 = --help || test -s $2 && echo '{json.dumps(tests)}'")
    cpu_decode.main(
        ["--layers", "1", "--tokens", "4", "--prompt", "32", "--repeats", "1", "--threads", "1"]
        + ["--recipes", "mxfp4_weight_only", "--llama-bench", str(program), "--peers", "Q4_0"]
    )
    header, own, peer = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[-4:-1]]
    assert header == ["", "tokens/s", "ms", "GB/s", "share", "prompt of 32, tokens/s"]
    assert own[0] == "mxfp4_weight_only" and all(float(value) > 0 for value in own[1:])
    assert peer[:3] == ["llama.cpp Q4_0", "80.0", "12.5"] and peer[-1] == "500"


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("exit 1", 0o755, "{} ended with exit status 1 (no message): give --llama-bench a llama-bench of"),
        ("echo a >&2; echo 'no lib' >&2; exit 127", 0o755, "{} ended with exit status 127 (no lib): give"),
        ("kill -9 $$", 0o755, "{} ended with signal 9 (no message): give"),
        ("exit 0", 0o644, "cannot run {} (Permission denied): give"),
    ],
)
def test_a_llama_bench_that_fails_ends_the_benchmark(text, mode, message, llama_bench):
    program = llama_bench(text, mode)
    with pytest.raises(SystemExit) as error:
        cpu_decode.main(["--llama-bench", str(program)])
    assert str(error.value).startswith(message.format(program)) and "\n" not in str(error.value)


@pytest.mark.parametrize("printed", ["", "usage", "[]", "5", '[{"n_gen": 4}]'])
def test_a_llama_bench_that_prints_no_times(printed, llama_bench):
    program = llama_bench(f"echo '{printed}'")
    options = argparse.Namespace(llama_bench=program, threads=1, tokens=4, prompt=0)
    with pytest.raises(SystemExit, match=f"^{program} printed no times of some.gguf: give --llama-bench"):
        cpu_decode._run_llama_bench(options, Path("some.gguf"))


def test_a_random_gguf_file(tmp_path):
    config = LlamaConfig(**TINY, num_hidden_layers=1, vocab_size=96)
    write_random_llama(tmp_path / "random.gguf", "Q4_0", config)
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "random.gguf").tensors}
    assert len(tensors) == 11 and tensors["token_embd.weight"].shape.tolist() == [TINY["hidden_size"], 96]
    values = gguf.dequantize(tensors["blk.0.ffn_down.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    assert values.shape == (TINY["hidden_size"], TINY["intermediate_size"]) and 0.01 < values.std() < 0.05


@pytest.mark.compiled
def test_a_distilled_model():
    """The chosen number of examples trains a model further than its rounding."""
    case = digits.case("mlp")
    sizes = []

    def lessons(count):
        sizes.append(count)
        return (case.batches * 8)[:count]

    case = replace(case, lessons=lessons, examples=80, rate=3e-3).to("cpu")
    rows = {row["rounding"]: row for row in case.rows(["balanced", "distilled"], ["W4A4"]) if "rounding" in row}
    assert sizes == [80] and float(rows["distilled"]["loss"]) < float(rows["balanced"]["loss"])


def test_formats_without_fp4_have_one_row():
    """Scale modes of FP4 do not change them."""
    case = replace(digits.case("mlp"), quantizer=efficientnet.quantizer, formats=("W8A8", "W4A8"))
    rows = [(row["format"], row["rounding"]) for row in case.rows([]) if "rounding" in row]
    assert rows == [("W8A8", "nearest"), *(("W4A8", f"nearest, {mode}") for mode in ("floor", "rceil_v2", "even"))]


def test_sentences_of_packages(monkeypatch):
    """Those for distillation are none of those for calibration; short and long ones are left out."""
    shared, other, long = "This sentence is in both of them.", "And another one is not at all.", "x" * 180 + " y."
    monkeypatch.setattr(texts, "sentences", lambda: [shared])
    monkeypatch.setattr(texts, "package_docstrings", lambda names: [f"{shared} {other} Short. {long}{long}"])
    assert texts.more_sentences(5) == [other] and texts.more_sentences(0) == []
    assert max(map(len, texts._docstrings([Path(__file__)]))) > 50
    with pytest.raises(ValueError, match="the text has 4 tokens, 2 windows of 3 need more"):
        texts.token_blocks(tokenizer_of_bytes(), "text", 2, 3)


def test_functions_of_files(monkeypatch, tmp_path):
    """The first long one of each file, with its indentation, cut."""
    body = "".join(f"        value{i} = {i}\n" for i in range(400))
    (tmp_path / "long.py").write_text(f"def short(): pass\nclass A:\n    def long(self):\n{body}")
    (tmp_path / "short.py").write_text("def short(): pass\n")
    (tmp_path / "newer.py").write_text("def broken(\n")
    monkeypatch.setattr(texts, "folder", lambda name: tmp_path)
    (text,) = texts.package_texts(["any"], read=texts.first_function)
    assert text == f"def long(self):\n{body}"[:2000]


def test_parts_of_a_file_are_joined(monkeypatch, tmp_path):
    monkeypatch.setattr(coder, "PARTS", ("no_such_part1", "no_such_part2"))
    for i, part in enumerate(coder.PARTS):
        (tmp_path / part / "data").mkdir(parents=True)
        (tmp_path / part / "data" / "part.bin").write_bytes(bytes([i, 7]))
    cached = tmp_path / "cache" / "whole.gguf"
    with pytest.raises(packages.NotInstalledError, match=r"part1 is not installed: pip install .*part\{1\.\.22\}"):
        coder.joined(cached)
    monkeypatch.setattr(coder, "require", lambda *modules, command: None)
    monkeypatch.setattr(coder, "folder", lambda name: tmp_path / name)
    assert coder.joined(cached).read_bytes() == bytes([0, 7, 1, 7])
    monkeypatch.setattr(coder, "folder", None)  # the second call reads the cache
    assert coder.joined(cached) == cached and [*cached.parent.iterdir()] == [cached]


def test_levels_of_a_weight():
    codes = torch.arange(32).remainder(16).expand(3, 2, 32)
    low = torch.tensor([-1.0, -0.5, 2.0])[:, None, None]
    weight = (low + 0.125 * codes).flatten(1)
    levels = continued.Levels.of(weight)
    assert levels.places(weight).tolist() == [192, 0, 0]
    assert levels.places(weight + 0.0625).tolist() == [0, 192, 96]
    assert levels.places(weight + 0.03125).tolist() == [0, 0, 48]


def test_training_leaves_the_levels(monkeypatch, tmp_path, capsys):
    decoder = tiny_decoder("llama", num_hidden_layers=2)
    for weight in continued.linear_weights(decoder).values():
        low, step = continued.Levels.of(weight)
        codes = ((weight.detach().unflatten(1, (-1, 32)) - low) / step).round()
        weight.data = (low + step * codes).flatten(1)
    monkeypatch.setattr(smollm2, "load", lambda: (decoder, tokenizer_of_bytes()))
    monkeypatch.setattr(texts, "package_texts", lambda names, backward, read: iter(["some text"] * 999))
    for name, value in {"WINDOWS": 2, "LENGTH": 16, "HELD_OUT": 2, "FOLDER": tmp_path, "WARM_UP": 1}.items():
        monkeypatch.setattr(continued, name, value)
    continued.main(["--layers", "1", "--steps", "8", "--folder", str(tmp_path)])
    header, before, after = (re.split("  +", line) for line in capsys.readouterr().out.splitlines()[:3])
    assert header == ["", "perplexity", "on levels", "halfway", "distance"]
    assert before[2] == "100.00%" and float(before[4]) < 0.01 and float(after[2].rstrip("%")) < 90
    assert float(after[1]) < float(before[1])
    trained, _ = continued.load()
    assert len(trained.model.layers) == 1
    for parameter in trained.parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, parameter.bfloat16().float())


@pytest.mark.compiled
def test_slices_of_a_small_model():
    """Nested weights are sliced to those of the narrow recipe; weights that were rounded in 8 bits are not."""
    rows = {row["rounding"]: row for row in slices.rows(digits.case("mlp"), "mxint8", False)}
    assert list(rows) == ["nearest", "sliced nearest", "balanced", "sliced balanced", "nested"]
    assert rows["nested"]["mxfp4"] == f"{rows['balanced']['mxfp4']} (1.00x)"
    assert float(str(rows["sliced balanced"]["mxfp4"]).split("(")[1].removesuffix("x)")) > 2


@pytest.mark.slow
def test_training_with_slices(monkeypatch):
    monkeypatch.setitem(qat.SCHEDULES, "cnn", (qat.Schedule(2, 3e-3), qat.Schedule(1, 2e-3)))
    figures = defaultdict(list)
    qat_slices.run("cnn", 0, ["mxint8", "int4"], figures)
    rows = qat_slices.table(figures, ["mxint8", "int4"])
    assert [row["format"] for row in rows] == ["mxint8", "int4"]
    assert rows[0]["alone"] == rows[0]["sliced"] != rows[0]["together"]
    assert all(0 < float(row["over alone"]) < 2 for row in rows)
