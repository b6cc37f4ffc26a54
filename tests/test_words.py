"""Names and words that the project has replaced by terms of the field may not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()

#: these name what is gone
_EXEMPT = {"tests/test_words.py", "pt2mx/deprecated.py", "tests/pt2mx/test_deprecated.py", "CHANGELOG.md"}
_SUFFIXES = {".py", ".md", ".ipynb", ".cpp", ".h", ".toml", ".yaml"}

#: what replaces it -> (a name or phrase as a regular expression, the folder where it may not occur)
NAMES = {
    "fuse_activation_quantize": ("quantize_in_passing|in passing", ""),
    "fuse_quantize_epilogue": ("quantize_in_(products|attention|convolutions)", ""),
    "activation_matmuls_bf16": ("products_of_activations", ""),
    "bf16_matmul": ("bfloat16_products", ""),
    "fp8_rowwise": (r"(?<!_)fp8_rows\b", ""),  # linear_fp8_rows and its like are operators of the contract
    "adjacent slices": ("neighbouring parts", ""),
    "WeightTarget, targets": (r"\bSite\b|\bsites\b", "pt2e/optimize"),
    "rows multiplied with it": ("rows that meet", ""),
    "im2col": (r"\bWindows\b|\bwindows\(", ""),
    "equivalent transformations": ("in other coordinates", ""),
    "matmul_ops, matmul_dims": (r"\bcontractions\b", ""),
    "attach_lazy, on_import": (r"\bwhen_imported\b|\blate import reach\b", ""),
    "register_all": ("prepare_process", ""),
    "memory_format": (r"\bpermuted_back\b|\bin_order\(", ""),
    "TensorInfo, PackedWeightInfo": ("Held(Tensor|Weight)", ""),
    "inspect_file": (r"\bcontents_of\b|pt2e[./]contents", ""),
    "remove_unused": (r"(remove|erase)_unread|\bunread\b", ""),
    "unused": ("nothing reads any more", ""),
    "min_sizes": (r"least_extents?|\bextents?\b", ""),
    "equal_dims, DimConstraint": (r"tied_extents|\bTie\b", ""),
    "probe, matches_eager": (r"\bTrial\b", "pt2e/packages"),
    "flatten_by_name": ("leaves_by_name", ""),
    "fresh_name, used_names": (r"\bnames_in\b|names\.unused", ""),
    "onnx/quantize/": ("float_(plan|graph|settings|constants|report|batch_norm)", ""),
    "action": (r"\bfates?\b", ""),
    "weight_users": ("packed_uses", ""),
    "eval_model, load_model": ("judged_model|checked_model", ""),
    "shapes_from_factory": ("stated_shapes", ""),
    "progress": (r"\bStages\b", "pt2e"),
    "diverge": ("comes? apart", ""),
    "record every value": ("with an eye on", ""),
    "HOPCall, HOPSignature": (r"\b_Form\b|\b_Operands\b", "fx"),
    "subgraphs": ("graphs? inside", ""),
    "hoist out of subgraphs": ("_CHOSEN_KEY|lift_weights", ""),
    "backend, CPU kernel": (r"\btwins?\b", ""),
    "supports": (r"unserved|\bkUnserved\b", ""),
    "microkernel_32x32_amx": ("square_in_tiles", ""),
    "merge_taps_of_row": ("is_of_lines", ""),
    "GemmTask, scan_and_pad": (r"look_at\b|look_through|\bMany\b", "pt2mx/kernels"),
    "kTileRows, kMicroTile": (r"\bk(Side|Pair|Square|Tall|Quads|Flat)\b", ""),
    "PT2MX_HAVE_AMX": ("PT2MX_(PAIRS|TILES)", ""),
    "attention_pv.h, quantize_vec.h": ("weighted_values|in_registers", ""),
    "wide dynamic range": ("many binades", ""),
    "spread over": ("shared out among", ""),
    "a variable named after its value": (r"^\s*found = |\bfor found in\b", ""),
}

#: files that have another name now
PATHS = """
    fx/graph/calls.py fx/passes/merge_graphs_inside.py pt2e/optimize/products.py pt2e/optimize/layouts.py
    pt2e/optimize/windows.py pt2e/optimize/coordinates.py pt2e/optimize/contractions.py pt2e/report/contractions.py
    pt2e/optimize/blocks.py pt2e/optimize/training.py pt2e/optimize/ranks.py pt2mx/late.py pt2mx/process.py
    pt2mx/ops/order.py pt2e/packages/trial.py pt2e/packages/crash.py pt2e/packages/nesting.py pt2e/onnx/targets.py
    pt2e/checkpoints/schemes.py pt2e/checkpoints/selection.py pt2e/checkpoints/readers.py pt2e/cli/start.py
    pt2e/cli/interrupts.py pt2e/cli/export_log.py pt2e/cli/config_shapes.py pt2e/cli/recordings.py
    pt2e/sensitivity/forms.py pt2e/sensitivity/unrolled.py pt2e/debug/watched.py pt2e/debug/pieces.py
    pt2mx/kernels/cpu/src/units.h pt2mx/kernels/cpu/src/squares.h pt2mx/kernels/cpu/src/lines.h
    pt2mx/kernels/cpu/src/many_rows.h pt2mx/kernels/cpu/src/windows.h pt2mx/kernels/cpu/src/panels.h
""".split()


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The text of each tracked file."""
    names = (name for name in _FILES if name not in _EXEMPT and Path(name).suffix in _SUFFIXES)
    return {name: (ROOT / name).read_text("utf-8") for name in names if (ROOT / name).is_file()}


def matches(texts: dict[str, str], pattern: str, folder: str = "") -> list[str]:
    """Return `file: text` of each match in the files of a folder."""
    regex = re.compile(pattern, re.MULTILINE)
    return [f"{name}: {match[0]}" for name in texts if name.startswith(folder) for match in regex.finditer(texts[name])]


@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_name_stays_away(texts, name):
    assert matches(texts, *NAMES[name]) == []


def test_renamed_files_stay_away():
    assert sorted(set(PATHS) & set(_FILES)) == []


def test_few_sentences_have_the_words_that_were_read_twice(texts):
    read = {name: text for name, text in texts.items() if name.endswith((".py", ".md"))}
    sentences = matches(read, r"\b(beside|by what|of which|stands?)\b")
    assert len(sentences) < 40, "\n".join(sentences)
