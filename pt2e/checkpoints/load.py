"""`load_checkpoint`: load codes and scales from a checkpoint as a language model that computes with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.configs import is_known, read_config
from pt2mx.pt2e.checkpoints.merge_parts import merge
from pt2mx.pt2e.checkpoints.packed_modules import (
    DATA,
    Inputs,
    fold_transposes,
    multiply,
    placeholder,
    replace_parameter,
)
from pt2mx.pt2e.checkpoints.regroup import Regrouping, divide
from pt2mx.pt2e.checkpoints.select_weights import as_matrix
from pt2mx.pt2e.checkpoints.transform_config import matrices
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.build_model import check_counts, skeleton_of, with_tensors
from pt2mx.pt2e.models.checkpoint_files import (
    CONFIG,
    CheckpointTensors,
    StoredTensors,
    quantization_of,
    read_json,
)
from pt2mx.pt2e.models.checkpoint_names import stored_parts
from pt2mx.pt2e.models.coverage import CheckpointValues, tensors_read
from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.gguf_tensors import has_codes, packed_gguf
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import (
    EXPERTS,
    LINEAR,
    Scheme,
    Schemes,
    is_transposed,
    tied_names,
    weights_of,
)
from pt2mx.pt2e.models.safetensors_shards import Entry
from pt2mx.pt2e.models.weight_formats import PackedTensors, read_tensor_scale
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pt2mx.pt2e.language.language_model import LanguageModel

#: the name of one of several experts
_EXPERT = re.compile(r"\.experts\.\d+")


class Packed(NamedTuple):
    """A weight that the checkpoint holds as codes: its scheme, and its tensors in the checkpoint, each with its rows.

    parts=None: the checkpoint has one tensor with the name of the parameter."""

    scheme: Scheme
    parts: dict[str, Tensor] | None


def is_mx_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a checkpoint for `load_checkpoint`.

    Args:
        folder: the folder of a checkpoint, or a GGUF file.

    Returns:
        True where the GGUF file holds weights in blocks of codes and scales, or the configuration names a layout of
        them.

    Raises:
        MXError: where its config.json cannot be read.

    Example:
        >>> import tempfile
        >>> from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     is_mx_checkpoint(folder)
        False
    """
    if (file := gguf_in(folder)) is not None:
        return has_codes(file)
    if not (Path(folder) / "config.json").is_file():
        return False
    config = quantization_of(Path(folder))
    return config is not None and is_known(config)


def load_checkpoint(
    folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    stage: Callable[[str], None] = lambda name: None,
    *,
    part: str | None = None,
    allow_partial: bool = False,
) -> LanguageModel:
    """Load a checkpoint in MX formats with its codes and scales to the bit, without a float copy of the model.

    The function loads compressed-tensors (MXFP4, MXFP6, MXFP8, NVFP4, mixed), gpt-oss (MXFP4), Quark, ModelOpt (MXFP8,
    NVFP4), FP8 in blocks with E8M0 or float scales, such as DeepSeek's, with experts in FP4, and GGUF (MXFP4, NVFP4,
    Q8_0, Q4_0; weights of other types become floats). The checkpoint decides the formats of inputs. In the last two
    inputs stay in high precision, for FP8 as in transformers without its kernel; elsewhere those of experts with a
    tensor scale each.

    Args:
        folder: the folder of the checkpoint, or a GGUF file.
        device: the device to export the model on.
        stage: called with the name of each stage as it begins.
        part: the top-level module to put into the program, such as "language_model"; the others may be left out.
        allow_partial: True: the program may leave out any part that text does not reach, and take codes for values in
            modules that the configuration calls unconverted.

    Returns:
        A model that generates and can be saved; its `coverage` is the share of the checkpoint's values that it holds.

    Raises:
        MXError: for a checkpoint that cannot be read or holds other formats; for a checkpoint whose program leaves out
            other parts than unused heads; for codes in a module that the configuration calls unconverted.

    Example:
        >>> import tempfile, torch, transformers, pt2mx
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=128, bos_token_id=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).bfloat16().eval()
        >>> quantized = pt2mx.quantize_language_model(model, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pt2mx.save_checkpoint(quantized, model, f"{folder}/mxfp4", unpack=[".*embed_tokens"])
        ...     loaded = pt2mx.load_checkpoint(f"{folder}/mxfp4")
        >>> loaded.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape
        torch.Size([1, 8])
    """
    from pt2mx.pt2e.language.decoder import PREFIX, export, export_decoder, inputs
    from pt2mx.pt2e.language.language_model import LanguageModel
    from pt2mx.pt2e.language.layers import layers_of
    from pt2mx.pt2e.models.tokenizers import load_generation_config, load_tokenizer

    if not isinstance(folder, str | os.PathLike):
        raise MXError(f"{folder!r} is no path: give the folder of a checkpoint")
    path = Path(folder)
    model, values = _load_packed(path, part, allow_partial)
    with user_errors(f"use the device {device!r}"):
        model.to(device)
    generation = load_generation_config(path)
    stage("export")
    program = export_decoder(model)
    coverage = values.held_by({name.removesuffix(DATA) for name in tensors_read(program, PREFIX)})
    coverage.check(part, allow_partial)
    graph = program.module()
    if fold_transposes(graph):
        program = export(graph, inputs(layers_of(model), model.device))
    language_model = LanguageModel(program, model.config, generation, load_tokenizer(path))
    language_model.coverage = coverage
    return language_model


def _load_packed(
    folder: Path, part: str | None = None, allow_partial: bool = False
) -> tuple[PreTrainedModel, CheckpointValues]:
    """Load the model, and the sizes of the checkpoint's tensors."""
    file = gguf_in(folder)
    skeleton, schemes, tensors, entries = _of_folder(folder) if file is None else packed_gguf(file)
    layout, dtype = schemes.layout, skeleton.dtype
    packed = packed_weights(skeleton, schemes, tensors)
    transforms = matrices(skeleton, schemes, tensors)
    if not packed:
        raise MXError(
            f"{str(folder)!r} holds no codes of a {type(skeleton).__name__}, although its quantization_config is of "
            f"{layout.name}"
        )
    biases = _linear_biases(skeleton, packed)
    not_floats = _packed_names(packed, layout, tensors) | {source for bias in biases for source in bias.sources}
    ends = tuple(f".{one.name}" for one in schemes.transforms)
    not_floats |= {name for name in tensors if name.rpartition(".")[0].endswith(ends)}
    floats = {name: entry for name, entry in entries.items() if name not in not_floats}
    shapes = {name: skeleton.get_parameter(name).shape for name in (*packed, *(bias.name for bias in biases))}
    values = CheckpointValues(skeleton, {**floats, **{name: Entry(dtype, (*shape,)) for name, shape in shapes.items()}})
    values.held_by().check(part, allow_partial)
    state = {name: placeholder(shapes[name], dtype) for name in packed}
    state |= {name: tensors[name] for name in floats if values.is_known(name)}
    for bias in biases:
        state |= bias.bias(tensors)
    model = with_tensors(skeleton, dtype, state, f"{layout.name} has codes elsewhere")
    tied = tied_names(skeleton)
    for name, weight in packed.items():
        codes = _codes(skeleton, name, weight, schemes, tensors)
        inputs = read_inputs(name, weight.scheme.inputs, weight.parts or (name,), layout, tensors)
        for alias in {name, *(tied.get(name, set()) - packed.keys())}:
            path, _, attribute = alias.rpartition(".")
            transposed = is_transposed(skeleton, alias)
            replace_parameter(model.get_submodule(path), attribute, codes, inputs, transposed)
    for path, location, matrix in transforms:
        multiply(model.get_submodule(path), location, matrix)
    return model, values


def _of_folder(folder: Path) -> tuple[PreTrainedModel, Schemes, CheckpointTensors, dict[str, Entry]]:
    """Return the model without its weights; of the checkpoint its schemes, its tensors, and their dtypes and shapes."""
    quantization = quantization_of(folder)
    if quantization is None:
        raise MXError(f"{str(folder)!r} holds a checkpoint in high precision: quantize it with a recipe")
    transformers = import_extra("transformers", "hf")
    schemes, tensors, source = read_config(quantization), CheckpointTensors(folder), folder / CONFIG
    shapes = [entry.shape for entry in tensors.entries.values()]
    check_counts(read_json(source), shapes, str(source))
    with user_errors(f"build the model of {str(source)!r}"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return skeleton_of(config, shapes, str(source)), schemes, tensors, tensors.entries


def packed_weights(skeleton: PreTrainedModel, schemes: Schemes, tensors: StoredTensors) -> dict[str, Packed]:
    """Return parameter -> `Packed`, for each parameter whose scales the checkpoint holds."""
    packed = {}
    for name, kind in weights_of(skeleton).items():
        parts = stored_parts(skeleton, name, schemes.layout)
        names = [name] if parts is None else list(parts)
        paths = [name, *names] if kind == EXPERTS else [part.rpartition(".")[0] for part in (name, *names)]
        if parts is not None and kind == EXPERTS:
            kind = LINEAR  # the checkpoint has a linear layer an expert
        scheme = next(filter(None, (schemes.of(one, kind) for one in reversed(paths))), None)
        if scheme is None:
            continue
        if parts is not None:  # the files of a base model lack the prefix, as those of DeepSeek-V4 do
            short = {part.removeprefix(f"{skeleton.base_model_prefix}."): rows for part, rows in parts.items()}
            has_short = any(schemes.layout.stored_names(part, scheme.form, tensors)[0] in tensors for part in short)
            parts = short if has_short else parts
            names = list(parts)
        codes, scales, *_ = schemes.layout.stored_names(names[0], scheme.form, tensors)
        if scales in tensors:
            packed[name] = Packed(scheme, parts)
        elif tensors.dtypes.get(codes, torch.float32).itemsize == 1:
            raise MXError(f"the checkpoint holds no {scales}, but codes of {names[0]}")
    return packed


def _linear_biases(skeleton: PreTrainedModel, packed: Mapping[str, Packed]) -> list[Regrouping]:
    """Return the biases of experts that the checkpoint holds as linear layers, and the model in one tensor."""
    split = [name for name, weight in packed.items() if weight.parts is not None and is_transposed(skeleton, name)]
    return [divide(skeleton, f"{name}_bias", into_one=True) for name in split]


def _packed_names(packed: dict[str, Packed], layout: Layout, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the tensors of the checkpoint that are codes or scales, of weights or of inputs."""
    parts = {part: weight.scheme for name, weight in packed.items() for part in weight.parts or (name,)}
    names = {name for part, scheme in parts.items() for name in layout.stored_names(part, scheme.form, tensors)}
    of_inputs = [name for name in (layout.input_scale, layout.pre_scale, layout.rotation, *layout.unused) if name]
    return names | {f"{part.rpartition('.')[0]}.{name}" for part in parts for name in of_inputs}


def _codes(
    skeleton: PreTrainedModel, name: str, weight: Packed, schemes: Schemes, tensors: Mapping[str, Tensor]
) -> PackedTensors:
    """Return the codes and scales of a parameter, (..., N, K).

    Raises:
        MXError: where they have another shape than the parameter.
    """
    layout, form = schemes.layout, weight.scheme.form
    parts = weight.parts or {name: torch.empty(0)}
    read = ((layout.from_tensors(part, form, tensors, schemes.block), rows) for part, rows in parts.items())
    layer = skeleton.get_submodule(name.rpartition(".")[0])
    expected = as_matrix(layer, skeleton.get_parameter(name)).shape
    codes = next(read)[0] if len(parts) == 1 else merge(name, expected[:-1], read)
    shape = (*codes.data.shape[:-1], codes.data.shape[-1] * 8 // codes.spec.element.bits)
    if shape != expected:
        raise MXError(
            f"the checkpoint has {name} of shape {shape}, its config.json of {tuple(expected)}: give files that "
            "belong together"
        )
    return codes


def read_inputs(
    name: str, inputs: MXSpec | None, parts: Iterable[str], layout: Layout, tensors: Mapping[str, Tensor]
) -> Inputs:
    """Return what happens to the inputs of a module. Those of experts with a tensor scale each stay in high precision.

    Args:
        name: the weight of the module.
        inputs: the spec of its inputs; None: high precision.
        parts: the tensors of the checkpoint that make up the weight.
        layout: their layout.
        tensors: the tensors of the checkpoint.

    Raises:
        MXError: where the tensor scale is missing, or parts of a weight have different factors or scales.
    """
    modules = {part.rpartition(".")[0] for part in parts}
    has_tensor_scale = inputs is not None and inputs.has_tensor_scale
    if len(modules) > 1 and _EXPERT.search(next(iter(modules))):
        changed = [f"{module}.{suffix}" for module in sorted(modules) for suffix in (layout.pre_scale, layout.rotation)]
        if suffix := next((name for name in changed if name in tensors), ""):
            raise MXError(f"{suffix} changes the inputs of one expert, which is not read: give a checkpoint without")
        if has_tensor_scale:
            return Inputs()
    read: list[Tensor | None] = []
    for suffix, required in (
        (layout.input_scale, has_tensor_scale),
        (layout.pre_scale, False),
        (layout.rotation, bool(layout.rotation)),
    ):
        values = [tensors[f"{module}.{suffix}"] for module in modules if f"{module}.{suffix}" in tensors]
        if required and len(values) < len(modules):
            raise MXError(
                f"the checkpoint holds no {min(modules)}.{suffix}, which changes its inputs: fetch it again; where it "
                "quantizes weights alone, its configuration says so (input_activations null, quant_algo W4A16_NVFP4)"
            )
        if any(not tensor.equal(values[0]) for tensor in values[1:]):
            raise MXError(f"{suffix} of the parts of {name} differ, and the model multiplies the same inputs with them")
        read.append(values[0] if values else None)
    tensor_scale, pre_scale, rotation = read
    if rotation is not None and not rotation.equal(rotation.mT):
        raise MXError(f"{min(modules)}.{layout.rotation} is no symmetric matrix, which is not read")
    if tensor_scale is not None and has_tensor_scale:
        tensor_scale = read_tensor_scale(f"{min(modules)}.{layout.input_scale}", tensor_scale)
    return Inputs(inputs, tensor_scale if has_tensor_scale else None, pre_scale, rotation)
