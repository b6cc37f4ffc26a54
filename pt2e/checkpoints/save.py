"""`save_checkpoint`: write a converted model as a checkpoint of Hugging Face that other libraries load."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints import modelopt_config
from pt2mx.pt2e.checkpoints.contents import Contents, build_contents, build_tensors
from pt2mx.pt2e.checkpoints.gguf_contents import TensorsInMemory, file_tensors
from pt2mx.pt2e.checkpoints.gguf_write import header_of, write_tensors
from pt2mx.pt2e.checkpoints.recode import alike_form
from pt2mx.pt2e.checkpoints.weight_users import WeightUser, weight_users
from pt2mx.pt2e.files.card import write_card
from pt2mx.pt2e.files.output import check_output, folder_errors, whole_file, write_text
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.models.checkpoint_files import INDEX, MODELOPT
from pt2mx.pt2e.models.gguf_file import SUFFIX
from pt2mx.pt2e.models.gguf_tensors import GGUF
from pt2mx.pt2e.models.hub import origin_of
from pt2mx.pt2e.models.layouts import LAYOUTS, Layout, layout_named
from pt2mx.pt2e.models.module_schemes import is_transposed, weights_of
from pt2mx.pt2e.models.safetensors_shards import Entry, ShardWriter
from pt2mx.pt2e.models.tokenizers import save_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_SHARD = "5GB"
#: the suffixes of the tensors of a weight in GGUF
_GGUF_SUFFIXES = {"", *(name for form in GGUF.stored for name in GGUF.names("", form))}


@dataclass(frozen=True)
class SaveReport:
    """The outcome of `save_checkpoint`.

    Args:
        changes: what the checkpoint states otherwise than the converted model, a line each.
        engines: engine with its version -> what it is known to do with the checkpoint, such as "loads it"; empty for
            "gguf".
    """

    changes: list[str]
    engines: dict[str, str]


def save_checkpoint(
    converted: Any,
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    layout: str | None = None,
    *,
    unpack: Sequence[str] = (),
    quantized_head: bool = False,
    tokenizer: Any = None,
    max_shard_size: int | str = _SHARD,
) -> SaveReport:
    """Write a converted model as a checkpoint that other libraries load, and say which are known to load it.

    Codes, scales and float tensors have the bits of the converted model. The folder appears complete or not at all.
    The codes of a head become values in a layout of which no engine is known to load them ("quark").

    Args:
        converted: the result of `convert_pt2e`, the program exported from it, or a `LanguageModel`.
        model: the float model of transformers before conversion, for its configuration and its names. It may be on the
            meta device if the converted model holds all weights.
        folder: the folder to write, new or empty; the file to write for "gguf".
        layout: "compressed-tensors", "mxfp4" (gpt-oss's experts), "quark", "fp8" or "modelopt"; None: the first of
            these that has the formats of the weights and inputs. "gguf" is a file of llama.cpp with weights in MXFP4.
        unpack: regular expressions of modules, such as `".*embed_tokens"`, whose weights are written as dequantized
            values in the model's dtype, because the layout cannot hold their codes.
        quantized_head: True: write the codes of the head where no engine is known to load them, too.
        tokenizer: the tokenizer to write, for "gguf" also a `GGUFFile` to copy it from; None: the tokenizer of a
            `LanguageModel`, if it has one.
        max_shard_size: the size of a file of tensors.

    Returns:
        What each engine is known to do with the checkpoint, and what the checkpoint states otherwise than the model.

    Raises:
        MXError: for anything that the layout or the libraries that load it do not support, before anything is written:
            other formats, blocks and axes, scale modes of inputs, dtypes of the model, a quantized cache, rotations
            of queries and keys, and of inputs in another layout than "compressed-tensors".

    Example:
        >>> import tempfile, torch, transformers, pt2mx
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=128, bos_token_id=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).bfloat16().eval()
        >>> quantized = pt2mx.quantize_language_model(model, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = pt2mx.save_checkpoint(quantized, model, f"{folder}/mxfp4", unpack=[".*embed_tokens"])
        ...     loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/mxfp4")
        >>> loaded.config.quantization_config.quantization_config.format
        'mxfp4-pack-quantized'
        >>> report.engines["transformers 5.24.0"]
        'loads it'
    """
    transformers = import_extra("transformers", "hf")
    if not isinstance(model, transformers.PreTrainedModel):
        raise MXError(f"expected the float model of transformers that was converted, not {type(model).__name__}")
    graph = _graph_of(converted)
    tokenizer = tokenizer or getattr(converted, "tokenizer", None)
    if layout == GGUF.name:
        _save_gguf(graph, model, folder, unpack, tokenizer)
        return SaveReport([], {})
    chosen = _default_layout(graph, model) if layout is None else layout_named(layout)
    contents = build_contents(graph, model, chosen, unpack, quantized_head)
    with whole_folder(folder) as target:
        _write_tensors(contents.tensors, target, max_shard_size)
        generation = next(
            (one.generation_config for one in (converted, model) if hasattr(one, "generation_config")), None
        )
        _write_configs(contents, generation, target)
        if tokenizer is not None:
            save_part(tokenizer, target)
        codes, name = getattr(converted, "_folder", None), Path(os.path.abspath(folder)).name
        origins = map(origin_of, (model.config._name_or_path, codes or ""))
        write_card(target, origins, name=name, engines=contents.engines, codes=codes)
    return SaveReport(contents.changes, contents.engines)


@contextmanager
def whole_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a temporary folder to write to, and rename it when the block ends. If the block fails, delete it.

    Raises:
        MXError: if no folder can be written there, or if it exists and is not empty.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise MXError(f"cannot write to {folder!r}: give the path of a folder")
    with folder_errors(folder):
        target = Path(os.path.realpath(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise MXError(f"{str(folder)!r} is there already: give a folder that is new or empty")
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f".{secrets.token_hex(8)}")
        try:
            written.mkdir()
            yield written
            os.replace(written, target)
        finally:
            shutil.rmtree(written, ignore_errors=True)


def _graph_of(converted: Any) -> GraphModule:
    is_program = isinstance(converted, GraphModule | ExportedProgram)  # which may have a layer of this name
    if not is_program and getattr(converted, "encoder", None) is not None:
        raise MXError(
            "the model has an encoder, and a checkpoint is written of one program: save_pretrained writes both"
        )
    program = getattr(converted, "program", converted)
    if isinstance(program, ExportedProgram):
        if is_shard(program):
            raise MXError("the program belongs to one of several ranks: save a model quantized for one rank")
        return program.module(check_guards=False)
    if not isinstance(program, GraphModule):
        raise MXError(
            f"expected a LanguageModel, an ExportedProgram or what convert_pt2e returned, not {type(program).__name__}"
        )
    return program


def _default_layout(graph: GraphModule, model: PreTrainedModel) -> Layout:
    """Return the first layout that holds all packed weights and says what happens to their inputs, else the first that
    has their formats; for transposed experts a layout of experts.

    Raises:
        MXError: where there is none.
    """
    users = weight_users(graph)
    transposed = [name for name in weights_of(model) if is_transposed(model, name)]
    packed_experts = any(user.weight.endswith(name) for user in users for name in transposed)
    for is_able in (_holds, _takes, _has_format):  # the last names in its error what the layout lacks
        for layout in LAYOUTS.values():
            if layout.only_experts == packed_experts and all(is_able(layout, user) for user in users):
                return layout
    elements = sorted({user.form for user in users})
    raise MXError(f"no layout has weights in {', '.join(elements)}: {'; '.join(map(_supported, LAYOUTS.values()))}")


def _holds(layout: Layout, user: WeightUser) -> bool:
    """Return whether a layout holds a weight in its own format, and says what happens to its inputs."""
    return user.form in layout.stored and _takes(layout, user)


def _takes(layout: Layout, user: WeightUser) -> bool:
    """Return whether a layout has a format with the values of a weight, and says what happens to its inputs."""
    inputs = user.inputs is None or layout.takes_inputs(user.inputs)
    changes = (user.pre_scale is None or bool(layout.pre_scale)) and (not user.rotated or layout.transforms)
    return _has_format(layout, user) and inputs and changes


def _has_format(layout: Layout, user: WeightUser) -> bool:
    """Return whether a layout has the format of a weight, or for scales of a tensor one with the same values."""
    form = alike_form(user.form, layout.stored) if user.spec.has_tensor_scale else user.form
    return form in layout.stored


def _supported(layout: Layout) -> str:
    return f"{layout.name} has {', '.join(layout.stored)}" + " of experts" * layout.only_experts


def _write_tensors(tensors: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> None:
    """Write tensors to one file, or to several with an index if they exceed the size of one."""
    hub = import_extra("huggingface_hub", "hf")
    try:
        # the function for torch counts memory, which tensors share and are views of; a file holds each for itself
        split = hub.split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise MXError(f"max_shard_size={max_shard_size!r} must be a number of bytes, such as '5GB': {error}") from None
    for file, names in split.filename_to_tensors.items():
        entries = {name: Entry(tensors[name].dtype, tuple(tensors[name].shape)) for name in names}
        with whole_file(folder / file) as opened:
            writer = ShardWriter(opened, entries, {"format": "pt"})
            for name in names:
                writer.write(name, 0, tensors[name].detach().cpu())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", folder / INDEX)


def _write_configs(contents: Contents, generation_config: Any, folder: Path) -> None:
    save_part(contents.config, folder)
    quantization = contents.config.quantization_config
    if quantization["quant_method"] == "modelopt":
        write_text(json.dumps(modelopt_config.file_of(quantization), indent=2) + "\n", folder / MODELOPT)
    if generation_config is None:  # an encoder has no generation config
        return
    try:
        generation_config.save_pretrained(folder)
    except ValueError as error:  # the configuration contradicts itself
        raise MXError(f"the generation config of the model cannot be written: {error}") from None


def _save_gguf(
    graph: GraphModule, model: PreTrainedModel, path: str | os.PathLike[str], unpack: Sequence[str], tokenizer: Any
) -> None:
    """Write a GGUF file: weights in `BLOCK_TYPES` with their codes, others as floats.

    It appears complete or not at all.

    Args:
        graph: the converted model.
        model: the float model that was converted, on any device, also meta.
        path: the file; its name ends in ".gguf".
        unpack: regular expressions of modules whose weights are written as dequantized values.
        tokenizer: the tokenizer, or a `GGUFFile` to copy it from; None: the file has no vocabulary.

    Raises:
        MXError: for a model that GGUF cannot hold, or that it would describe as another; nothing is written then.
    """
    check_output(path, (SUFFIX,))
    tensors = build_tensors(graph, model, GGUF, unpack).tensors
    stored = file_tensors(model, TensorsInMemory(_tied_once(model, tensors)))
    header = header_of(model.config, stored, tokenizer)
    with whole_file(path) as file:
        write_tensors(file, header, stored)


def _tied_once(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the second name of tied weights, unless they differ."""
    for name, other in (model.all_tied_weights_keys or {}).items():
        pairs = [(name + suffix, other + suffix) for suffix in _GGUF_SUFFIXES]
        same = [pair for pair in pairs if pair[0] in tensors and pair[1] in tensors]
        if same and all(torch.equal(tensors[one], tensors[two]) for one, two in same):
            tensors = {key: tensor for key, tensor in tensors.items() if key not in dict(same)}
    return tensors
