"""`convert_checkpoint`: quantize a float checkpoint file by file, without building the model."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pt2mx.algorithms.options import GPTQ
from pt2mx.errors import MXError, check_integer
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.checkpoints import modelopt_config
from pt2mx.pt2e.checkpoints.conversion_plan import ConversionPlan, plan_conversion
from pt2mx.pt2e.checkpoints.convert_shards import ShardConverter
from pt2mx.pt2e.checkpoints.gguf_convert import convert_to_gguf
from pt2mx.pt2e.checkpoints.recode_plan import plan_recoding
from pt2mx.pt2e.checkpoints.select_weights import check_weights_only
from pt2mx.pt2e.checkpoints.sources import Source, read_source
from pt2mx.pt2e.checkpoints.statistics import InputStatistics
from pt2mx.pt2e.files.output import check_output, folder_errors, write_text
from pt2mx.pt2e.models.checkpoint_files import CONFIG, INDEX, MODELOPT, WHOLE
from pt2mx.pt2e.models.gguf_file import SUFFIX
from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.gguf_tensors import GGUF
from pt2mx.pt2e.models.layouts import layout_named
from pt2mx.pt2e.models.tokenizers import load_tokenizer, save_part
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.version import __version__

#: the file that describes the conversion; the output contains it until the conversion is complete
MANIFEST = ".pt2mx-conversion.json"
#: suffixes of weights in other formats, which are not copied
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
#: a file that `whole_file` leaves if a process is killed
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.(safetensors|json)")


@dataclass(frozen=True)
class ConversionReport:
    """The outcome of `convert_checkpoint`.

    Args:
        quantized: tensor -> its format.
        left: tensor of two or more dimensions that is not quantized -> the reason.
        kept: shards that an earlier, interrupted run had finished.
        bytes_before, bytes_after: the bytes of all tensors.
        changes: what the checkpoint states otherwise than the recipe, a line each.
        engines: engine with its version -> what it is known to do with the checkpoint, such as "loads it".
    """

    quantized: dict[str, str]
    left: dict[str, str]
    kept: list[str]
    bytes_before: int
    bytes_after: int
    changes: list[str]
    engines: dict[str, str]


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: MXQuantizer | str | os.PathLike[str] | None = None,
    *,
    layout: str = "compressed-tensors",
    weights: str | None = None,
    dtype: str | torch.dtype | None = None,
    statistics: Mapping[str, InputStatistics] | None = None,
    quantized_head: bool = False,
    jobs: int = 1,
    finished: Callable[[str, int], None] = lambda shard, shards: None,
) -> ConversionReport:
    """Quantize the checkpoint of a transformers model shard by shard, in a few hundred megabytes of memory.

    The recipe selects linear layers, as it would in the exported model, and experts. Their weights are rounded to
    nearest, with the bytes of `quantize_mx`; GPTQ rounds weights with statistics of their inputs. Embeddings are not
    quantized, nor heads that share their weight, nor heads in a layout of which no engine is known to load them. A
    second call continues an interrupted run; it writes config.json last.

    A checkpoint holds weights, and libraries quantize inputs as they run, by the scale mode of the layout: that is what
    the configuration states, whatever mode the recipe names. Inputs of experts stay in high precision.

    Args:
        source: the folder of the checkpoint: config.json and safetensors, sharded or not; or a GGUF file.
        output: the folder to write; new, empty, or the output of an interrupted run. For "gguf" the file.
        recipe: a shipped recipe, the path of one, or a quantizer; None: "mxfp4_weight_only". A checkpoint that is
            quantized already takes none: its codes go into the new layout, with scales that give the same values.
        layout: "compressed-tensors", "quark", "modelopt", "fp8", "mxfp4" of gpt-oss's experts, or "gguf", one file.
        weights: the format of weights for the codes of a quantized checkpoint, such as "nvfp4"; None: the most similar
            that the layout has.
        dtype: the dtype of float tensors that are not quantized, such as "bfloat16"; None: their own.
        statistics: parameter of the model -> statistics of its inputs, from `collect_statistics` or `StatisticsFile`.
            GPTQ then needs memory for the weight and some copies of (K, K) floats. The recipe has its options.
        quantized_head: True: quantize the head where no engine is known to load it, too.
        jobs: the number of shards to convert at a time.
        finished: called with each finished shard and the number of shards.

    Returns:
        The quantized tensors, and for others the reasons why they are not.

    Raises:
        MXError: for a checkpoint that cannot be read; for one that is quantized already, with a recipe, or where the
            layout has no format with the same values; for a tensor that the index or the model names and no file
            holds; for formats that the layout lacks, before anything is written; for an output that holds something
            else; for a finite value that becomes Inf in `dtype`.

    Example:
        >>> import tempfile, transformers, pt2mx
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).bfloat16()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(f"{folder}/float")
        ...     report = pt2mx.convert_checkpoint(f"{folder}/float", f"{folder}/mxfp4", "mxfp4_weight_only")
        >>> report.quantized["model.layers.0.mlp.up_proj.weight"]
        'mxfp4_e2m1{32}(even,even)'
    """
    path, output = _folder("source", source), _folder("output", output)
    check_integer("jobs", jobs, 1)
    chosen = "mxfp4_weight_only" if recipe is None else recipe
    quantizer = chosen if isinstance(chosen, MXQuantizer) else MXQuantizer.from_recipe(chosen)
    check_weights_only(quantizer, () if statistics is None else (GPTQ,))
    keep_codes = recipe is None and statistics is None
    plan, checkpoint = _plan(path, quantizer, layout, _dtype(dtype), weights, keep_codes, quantized_head)
    _check_statistics(statistics, plan)
    formats = {name: str(spec) for name, spec in plan.chosen.items()}
    manifest = {
        "pt2mx": __version__,
        "shards": {str(file.resolve()): _stamp(file) for file in plan.shards.files},
        "config": plan.config,
        "formats": formats,
        "statistics": sorted(statistics or ()),
    }
    options = next((one for one in quantizer.algorithms or () if isinstance(one, GPTQ)), GPTQ())
    if options.correction is not None:
        raise MXError(
            f"GPTQ(correction={options.correction}) runs the model, and a checkpoint is converted without it: leave "
            "correction out, or quantize with pt2mx.quantize_language_model and save_checkpoint"
        )
    converter = ShardConverter(plan, statistics or {}, options)
    if layout == GGUF.name:
        check_output(output, (SUFFIX,))
        with folder_errors(output):
            kept = convert_to_gguf(checkpoint, converter, output, json.dumps(manifest), finished)
    else:
        with folder_errors(output):
            kept = sorted(_resume(output, plan.entries, manifest))
        remaining = [shard for shard in plan.entries if shard not in kept]
        converter.convert(remaining, output, jobs, lambda shard: finished(shard, len(plan.entries)))
        with folder_errors(output):
            _write_other_files(plan, path, output)
    before = sum(entry.nbytes for entries in plan.entries.values() for entry in entries.values())
    return ConversionReport(formats, plan.left, kept, before, plan.size(), plan.changes, plan.engines)


def _plan(
    path: Path,
    quantizer: MXQuantizer,
    layout: str,
    dtype: torch.dtype | None,
    weights: str | None,
    keep_codes: bool,
    quantized_head: bool,
) -> tuple[ConversionPlan, Source]:
    """Decide about every tensor, from the headers of the checkpoint."""
    if not path.is_dir() and gguf_in(path) is None:
        raise MXError(f"{str(path)!r} is no folder: give the folder of a checkpoint, or a GGUF file")
    target = GGUF if layout == GGUF.name else layout_named(layout)
    source = read_source(path, target, keep_codes)
    if source.schemes is not None and not keep_codes:
        raise MXError(
            f"{str(path)!r} is quantized already (quant_method {source.schemes.layout.name!r}): give the float "
            "checkpoint, or no recipe (--recipe) and no statistics, which keeps its codes"
        )
    if source.schemes is not None:
        return plan_recoding(source, target, dtype, weights), source
    if weights is not None:
        raise MXError(f"weights={weights!r} (--weights) is for codes: give the float {str(path)!r} a recipe (--recipe)")
    return plan_conversion(source, quantizer, target, dtype, quantized_head), source


def _check_statistics(statistics: object, plan: ConversionPlan) -> None:
    """Raise an `MXError` for statistics that match no quantized weight: all weights would be rounded to nearest."""
    if statistics is not None and not isinstance(statistics, Mapping):
        raise MXError(f"statistics={statistics!r} must be what collect_statistics returns, or a StatisticsFile")
    weights = plan.parameters.values()
    if statistics and (other := [spec for spec in plan.chosen.values() if not spec.has_plain_scale]):
        raise MXError(f"GPTQ with statistics rounds formats with E8M0 scales of one row, not {other[0]}")
    if statistics and statistics.keys().isdisjoint(weights):
        raise MXError(
            f"the statistics are of {next(iter(statistics))}, and of no weight that is quantized, such as "
            f"{next(iter(weights))}: collect them of this model"
        )


def _resume(output: Path, shards: Container[str], manifest: dict[str, Any]) -> set[str]:
    """Begin an output, or continue the output of an interrupted run; return its finished shards.

    Raises:
        MXError: where the output holds anything else.
    """
    text = json.dumps(manifest)
    output.mkdir(parents=True, exist_ok=True)
    partial = set(filter(_PARTIAL.fullmatch, os.listdir(output)))
    files = set(os.listdir(output)) - partial
    if files and MANIFEST not in files:
        raise MXError(f"{str(output)!r} holds files already: give a new folder")
    if files and (output / MANIFEST).read_bytes() != text.encode():
        raise MXError(
            f"{str(output)!r} holds an unfinished conversion with other settings or of another checkpoint: remove the "
            "folder, or give another"
        )
    for name in partial:
        (output / name).unlink()
    write_text(text, output / MANIFEST)
    return {name for name in files if name in shards}


def _write_other_files(plan: ConversionPlan, source: Path, output: Path) -> None:
    """Write the index, copy the tokenizer and other files, and write the configuration last."""
    names = {
        shard: [written for name, entry in entries.items() for written in plan.outputs(name, entry)]
        for shard, entries in plan.entries.items()
    }
    if list(plan.entries) != [WHOLE]:
        index = {
            "metadata": {"total_size": plan.size()},
            "weight_map": {name: shard for shard, written in names.items() for name in written},
        }
        write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", output / INDEX)
    if gguf_in(source) is not None and (tokenizer := load_tokenizer(source)) is not None:
        save_part(tokenizer, output)
    for path in _others(source, output):
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, output / path)
    quantization = plan.config["quantization_config"]
    if quantization["quant_method"] == "modelopt":
        write_text(json.dumps(modelopt_config.file_of(quantization), indent=2) + "\n", output / MODELOPT)
    write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n", output / CONFIG)
    (output / MANIFEST).unlink()


def _others(source: Path, output: Path) -> list[Path]:
    """Return the files to copy, also from subfolders, except hidden files and files of the output; none of a GGUF
    file."""
    if not source.is_dir() or gguf_in(source) is not None:
        return []
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.name.endswith(_WEIGHTS)]
    relative = [path.relative_to(source) for path in files if output.resolve() not in path.resolve().parents]
    return [path for path in relative if path != Path(CONFIG) and not any(part.startswith(".") for part in path.parts)]


def _stamp(path: Path) -> list[int]:
    """Return values that change when a file changes."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _dtype(dtype: object) -> torch.dtype | None:
    result = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (result is None) != (dtype is None) or result not in (None, *HIGH_PRECISION):
        raise MXError(f"dtype={dtype!r} must be 'float32', 'float16' or 'bfloat16'")
    return result


def _folder(name: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise MXError(f"{name}={path!r} must be the path of a folder")
    return Path(path)
