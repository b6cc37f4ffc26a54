"""`convert_checkpoint`: a float checkpoint becomes a quantized one, file by file. No model is built."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pt2mx.algorithms.options import GPTQ
from pt2mx.errors import MXError
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.checkpoints.checkpoint_files import CONFIG, INDEX, MODELOPT
from pt2mx.pt2e.checkpoints.conversion_plan import ConversionPlan, plan_conversion
from pt2mx.pt2e.checkpoints.convert_shards import ShardConverter
from pt2mx.pt2e.checkpoints.layouts import layout_named
from pt2mx.pt2e.checkpoints.plain_configs import modelopt_file
from pt2mx.pt2e.checkpoints.selection import check_weights_only
from pt2mx.pt2e.checkpoints.statistics import InputStatistics
from pt2mx.pt2e.output import write_text
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.version import __version__

#: in the output until it is whole: of what it is made
MANIFEST = ".pt2mx-conversion.json"
#: files of weights in other forms, which are not copied
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
#: what `whole_file` leaves where a process is killed
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.(safetensors|json)")


@dataclass(frozen=True)
class ConversionReport:
    """The outcome of `convert_checkpoint`.

    Args:
        quantized: tensor -> its format.
        left: tensor of two or more dimensions that stays -> why.
        kept: shards that an earlier, interrupted run had finished.
        bytes_before, bytes_after: of all tensors.
    """

    quantized: dict[str, str]
    left: dict[str, str]
    kept: list[str]
    bytes_before: int
    bytes_after: int


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: MXQuantizer | str | os.PathLike[str] = "mxfp4_weight_only",
    *,
    layout: str = "compressed-tensors",
    dtype: str | torch.dtype | None = None,
    statistics: Mapping[str, InputStatistics] | None = None,
    jobs: int = 1,
    finished: Callable[[str, int], None] = lambda shard, shards: None,
) -> ConversionReport:
    """Quantize the checkpoint of a transformers model shard by shard, in some hundred megabytes of memory.

    The recipe selects linear layers, as it would in the exported model, and experts; their weights are rounded to
    nearest, and hold the bytes of `quantize_mx`, or by GPTQ where there are statistics of their inputs. Embeddings, and
    a head that is one, stay as they are. An interrupted run goes on where it was when it is called again; config.json
    is written last.

    Args:
        source: the folder of the checkpoint: config.json and safetensors, sharded or not.
        output: the folder that is written; new, empty, or of an interrupted run.
        recipe: a shipped recipe, the path of one, or a quantizer.
        layout: "compressed-tensors", "quark", "modelopt", "fp8", or "mxfp4" of gpt-oss's experts.
        dtype: to which float tensors that stay are cast, such as "bfloat16"; None keeps theirs.
        statistics: of inputs, as `collect_statistics` returns them or `StatisticsFile` reads them: parameter of the
            model -> its inputs. GPTQ then holds the weight and some copies of (K, K) floats, whatever their size. Its
            options are those of the recipe.
        jobs: shards that are converted at a time.
        finished: is called with each shard that is whole, and their number.

    Returns:
        What was quantized, and what was not and why.

    Raises:
        MXError: for a checkpoint that cannot be read or is quantized already; for a tensor that the index or the model
            names and no file holds; for formats that the layout does not have: by name and before anything is written;
            for an output that holds something else, and for a finite value that `dtype` would make Inf.

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
    source, output = _folder("source", source), _folder("output", output)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise MXError(f"jobs={jobs!r} must be a number of shards, at least 1")
    quantizer = recipe if isinstance(recipe, MXQuantizer) else MXQuantizer.from_recipe(recipe)
    check_weights_only(quantizer, () if statistics is None else (GPTQ,))
    if not source.is_dir():
        raise MXError(f"{str(source)!r} is no folder: give that of a checkpoint")
    plan = plan_conversion(source, quantizer, layout_named(layout), _dtype(dtype))
    _check_statistics(statistics, plan)
    formats = {name: str(spec) for name, spec in plan.chosen.items()}
    manifest = {
        "pt2mx": __version__,
        "shards": {str((source / shard).resolve()): _stamp(source / shard) for shard in plan.entries},
        "config": plan.config,
        "formats": formats,
        "statistics": sorted(statistics or ()),
    }
    with _errors_of_writing(output):
        done = _resume(output, plan.entries, manifest)
    options = next((one for one in quantizer.algorithms or () if isinstance(one, GPTQ)), GPTQ())
    converter = ShardConverter(plan, statistics or {}, options)
    left = [shard for shard in plan.entries if shard not in done]
    converter.convert(left, source, output, jobs, lambda shard: finished(shard, len(plan.entries)))
    with _errors_of_writing(output):
        _write_rest(plan, source, output)
    before = sum(entry.nbytes for entries in plan.entries.values() for entry in entries.values())
    return ConversionReport(formats, plan.left, sorted(done), before, plan.size())


def _check_statistics(statistics: object, plan: ConversionPlan) -> None:
    """Raise an error for statistics of no weight that is quantized: all would be rounded to nearest."""
    if statistics is not None and not isinstance(statistics, Mapping):
        raise MXError(f"statistics={statistics!r} must be what collect_statistics returns, or a StatisticsFile")
    weights = plan.parameters.values()
    if statistics and statistics.keys().isdisjoint(weights):
        raise MXError(
            f"the statistics are of {next(iter(statistics))}, and of no weight that is quantized, such as "
            f"{next(iter(weights))}: collect them of this model"
        )


@contextmanager
def _errors_of_writing(output: Path) -> Iterator[None]:
    try:
        yield
    except MXError:
        raise
    except (OSError, ValueError) as error:  # the latter of a path that holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise MXError(f"cannot write to {str(output)!r}: {reason}; give a folder") from None


def _resume(output: Path, shards: Container[str], manifest: dict[str, Any]) -> set[str]:
    """Begin an output, or go on with that of an interrupted run: the shards that are whole.

    Raises:
        MXError: where it holds anything else.
    """
    text = json.dumps(manifest)
    output.mkdir(parents=True, exist_ok=True)
    partial = set(filter(_PARTIAL.fullmatch, os.listdir(output)))
    held = set(os.listdir(output)) - partial
    if held and MANIFEST not in held:
        raise MXError(f"{str(output)!r} holds files already: give a new folder")
    if held and (output / MANIFEST).read_text(encoding="utf-8") != text:
        raise MXError(
            f"{str(output)!r} holds an unfinished conversion with other settings or of another checkpoint: remove the "
            "folder, or give another"
        )
    for name in partial:
        (output / name).unlink()
    write_text(text, output / MANIFEST)
    return {name for name in held if name in shards}


def _write_rest(plan: ConversionPlan, source: Path, output: Path) -> None:
    """Write what stands beside the shards: the index, the tokenizer and other files, and at last the configuration."""
    names = {
        shard: [written for name, entry in entries.items() for written in plan.outputs(name, entry)]
        for shard, entries in plan.entries.items()
    }
    if (source / INDEX).is_file():
        index = {
            "metadata": {"total_size": plan.size()},
            "weight_map": {name: shard for shard, written in names.items() for name in written},
        }
        write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", output / INDEX)
    for path in _others(source, output):
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, output / path)
    quantization = plan.config["quantization_config"]
    if quantization["quant_method"] == "modelopt":
        write_text(json.dumps(modelopt_file(quantization), indent=2) + "\n", output / MODELOPT)
    write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n", output / CONFIG)
    (output / MANIFEST).unlink()


def _others(source: Path, output: Path) -> list[Path]:
    """The files that are copied, also of folders inside, but for hidden ones and the output's."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.name.endswith(_WEIGHTS)]
    inside = [path.relative_to(source) for path in files if output.resolve() not in path.resolve().parents]
    return [path for path in inside if path != Path(CONFIG) and not any(part.startswith(".") for part in path.parts)]


def _stamp(path: Path) -> list[int]:
    """By which a file that changed is known."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _dtype(dtype: object) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (found is None) != (dtype is None) or found not in (None, *HIGH_PRECISION):
        raise MXError(f"dtype={dtype!r} must be 'float32', 'float16' or 'bfloat16'")
    return found


def _folder(name: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise MXError(f"{name}={path!r} must be the path of a folder")
    return Path(path)
