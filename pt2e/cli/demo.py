"""`make demo`: a real sentence encoder in three MX recipes, from the pretrained weights to a compiled program."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from pt2mx.pt2e.cli.models import load_minilm
from pt2mx.pt2e.cli.sentences import sentences
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report

RECIPES = ("mxfp8", "mxfp6_weights_mxfp8_activations", "mxfp4_weight_only")


def main(recipes: tuple[str, ...] = RECIPES, compile: bool = True) -> None:
    """Print the report of the first recipe, then a table of all of them."""
    encoder, tokenize = load_minilm()
    texts = sentences()
    inputs = tokenize(texts)  # (72, S) int64, twice
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=512)
    shapes = {name: {0: batch, 1: sequence} for name in ("input_ids", "attention_mask")}
    program = torch.export.export(encoder, tokenize(texts[:2]), dynamic_shapes=shapes)
    embeddings = _embed(program.module(), inputs)
    rows = [("recipe", "MB", "of float", "bits", "cosine", "worst", "retrieval", "reloaded", "compiled")]
    with tempfile.TemporaryDirectory() as folder:
        float_size = _save(program, Path(folder) / "float.pt2")
        for recipe in tqdm(recipes, disable=None, file=sys.stderr):
            converted, report = quantize(program.module(), recipe, inputs)
            if recipe == recipes[0]:
                print(report.to_table(), end="\n\n")
            got = _embed(converted, inputs)
            cosine = cosine_similarity(got, embeddings)
            path = Path(folder) / f"{recipe}.pt2"
            size = _save(torch.export.export(converted, tokenize(texts[:2]), dynamic_shapes=shapes), path)
            reloaded = _embed(torch.export.load(path).module(), inputs)
            compiled = _embed(torch.compile(converted), inputs) if compile else None
            rows.append(
                (
                    recipe,
                    f"{size / 1e6:.1f}",
                    f"{size / float_size:.3f}x",
                    f"{report.effective_bits:.2f}",
                    f"{cosine.mean():.4f}",
                    f"{cosine.min():.4f}",
                    f"{_agreement(got, embeddings):.0%}",
                    "same bits" if torch.equal(reloaded, got) else "DIFFERS",
                    f"cosine {cosine_similarity(compiled, got).mean():.6f}" if compile else "not run",
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\nall-MiniLM-L6-v2, {float_size / 1e6:.1f} MB in float32; {len(texts)} sentences. cosine: to the float")
    print("embeddings, on the average and at worst. retrieval: questions whose nearest answer is the float model's.")
    print("compiled: torch.compile against eager; sums in another order flip a few roundings of activations.")


def quantize(model: nn.Module, recipe: str, inputs: tuple[Tensor, Tensor]) -> tuple[nn.Module, QuantizationReport]:
    """Prepare, calibrate on the inputs and convert an exported model."""
    prepared = prepare_pt2e(model, MXQuantizer.from_recipe(recipe))
    _embed(prepared, inputs)
    converted = convert_pt2e(prepared)
    return converted, quantization_report(converted)


def _embed(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(*inputs)  # (72, 384) float32


def _agreement(got: Tensor, want: Tensor) -> float:
    """Share of questions whose nearest answer is the same by both sets of embeddings."""
    nearest = [(e[: len(e) // 2] @ e[len(e) // 2 :].T).argmax(1) for e in (got, want)]
    return (nearest[0] == nearest[1]).float().mean().item()


def _save(program: torch.export.ExportedProgram, path: Path) -> int:
    torch.export.save(program, path)
    return path.stat().st_size


if __name__ == "__main__":
    main()
