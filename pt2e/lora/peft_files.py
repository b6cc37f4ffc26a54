"""Adapters in the files of peft: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra
from pt2mx.fx.graph.node import LinearMX, value_of
from pt2mx.pt2e.files.output import whole_file, write_text
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language.decoder import PREFIX
from pt2mx.pt2e.lora.adapters import DOWN, UP, adapters_of, linear_layers, qualified
from pt2mx.pt2e.lora.add import add_adapters, trainable_graph

Folder = str | os.PathLike[str]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: what peft writes before the names of a model's modules
_BASE = "base_model.model."
#: inputs of a `LanguageModel`'s program, whose names have a prefix that the checkpoint's lack
_OF_DECODER = {"logits_to_keep", "start"}
#: settings of peft's `LoraConfig` that change what an adapter computes -> the values that pt2mx reads
_READ: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("arrow_config", "kasa_config", "trainable_token_indices", "target_parameters"), (None, [])),
}


def save_lora(model: GraphModule | ExportedProgram, folder: Folder, base_model: str | None = None) -> None:
    """Write the adapters of a model in the files of peft, for `PeftModel.from_pretrained` of a float model.

    A float model whose weights are those that the codes stand for gives the outputs of `model`, but for quantized
    activations; other float weights are not what the adapters were trained with. Adapters of a model whose weights were
    rotated or smoothed (`pt2mx.optimize`) belong to those weights, unless the rotation is at run time.

    Args:
        model: what `add_lora` returned, trained, or an export of it.
        folder: the folder, which is made where it is missing. Names of modules are those of the exported model; for a
            `LanguageModel`, those of the model of transformers.
        base_model: the name or the folder of the float model, for those who load the adapters.

    Raises:
        MXError: for a model without adapters, without safetensors, and where no file can be written.

    Example:
        >>> import os, tempfile, torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pt2mx.save_lora(pt2mx.add_lora(converted, rank=4), folder)
        ...     sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    graph = graph_with_adapters(model)
    is_decoder = _OF_DECODER <= {str(node.target) for node in graph.graph.find_nodes(op="placeholder")}
    prefix = PREFIX if is_decoder else ""
    adapters = {module.removeprefix(prefix): adapter for module, adapter in adapters_of(graph).items()}
    ranks = {module: adapter.rank for module, adapter in adapters.items()}
    alphas = {module: adapter.scaling * adapter.rank for module, adapter in adapters.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_decoder else None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapters),
        "rank_pattern": {module: other for module, other in ranks.items() if other != rank},
        "alpha_pattern": {module: other for module, other in alphas.items() if other != alpha},
    }
    tensors: dict[str, Tensor] = {}
    for module, adapter in adapters.items():
        tensors[_BASE + qualified(module, DOWN)] = adapter.down.detach().contiguous()
        tensors[_BASE + qualified(module, UP)] = adapter.up.detach().contiguous()
    content = import_extra("safetensors.torch", "hf").save(tensors, {"format": "pt"})
    with user_errors(f"write {str(folder)!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    with whole_file(Path(folder, WEIGHTS)) as file:
        file.write(content)
    write_text(json.dumps(config, indent=2) + "\n", Path(folder, CONFIG))


def load_lora(model: GraphModule | ExportedProgram, folder: Folder) -> GraphModule:
    """Add the adapters that `save_lora` or peft wrote to a converted model.

    Args:
        model: as for `add_lora`.
        folder: with `adapter_config.json` and `adapter_model.safetensors`. A module of the file may be the end of the
            name of one of the model.

    Returns:
        As `add_lora`, with the factors of the file in float32. Dropout of the adapters is not applied.

    Raises:
        MXError: as `add_lora`; for a folder without these files or with damaged ones; for adapters that compute
            anything else (DoRA, biases), of layers that the model lacks, or of other shapes.

    Example:
        >>> import tempfile, torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> lora = pt2mx.add_lora(converted, rank=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pt2mx.save_lora(lora, folder)
        ...     torch.equal(pt2mx.load_lora(converted, folder)(x), lora(x))
        True
    """
    config, tensors = _read(Path(folder))
    graph = trainable_graph(model)
    layers, chosen = linear_layers(graph), {}
    values: dict[str, Tensor] = {}
    for name in dict.fromkeys(re.sub(rf"\.?({DOWN}|{UP})", "", key) for key in tensors):
        module = _module(name, layers)
        call = LinearMX.expect(layers[module][0])
        n, k = value_of(layers[module][0]).shape[-1], value_of(call.x).shape[-1]
        down, up = (tensors.get(qualified(name, factor), torch.empty(0)) for factor in (DOWN, UP))
        rank = len(down)
        if not rank or (down.shape, up.shape) != ((rank, k), (n, rank)):
            raise MXError(
                f"the adapter of {name!r} has factors of {tuple(down.shape)} and {tuple(up.shape)}, not (rank, {k}) "
                f"and ({n}, rank), as {module!r} of the model needs"
            )
        chosen[module] = rank, _scaling(config, name, rank)
        values |= {qualified(module, DOWN): down, qualified(module, UP): up}
    graph = add_adapters(graph, chosen)
    with torch.no_grad():
        for name, value in values.items():
            graph.get_parameter(name).copy_(value)
    return graph


def graph_with_adapters(model: GraphModule | ExportedProgram) -> GraphModule:
    """Return a graph with adapters, or that of its export.

    Raises:
        MXError: for another model.
    """
    graph = model.module(check_guards=False) if isinstance(model, ExportedProgram) else model
    is_graph = isinstance(graph, GraphModule)
    factors = [name for name, _ in graph.named_parameters() if name.endswith(DOWN)] if is_graph else []
    if not factors:
        raise MXError(f"expected a model with adapters, not {type(model).__name__}: pass what add_lora returned")
    if len(factors) != len(adapters_of(graph)):
        raise MXError("expected a model with adapters, not a lowered one: pass what add_lora returned")
    return graph


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration, and the factors by module and name, without peft's prefix."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise MXError(f"{str(folder)!r} has no {name}: give a folder that save_lora or peft wrote")
    with user_errors(f"read {str(folder)!r}"):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        stored = import_extra("safetensors.torch", "hf").load_file(folder / WEIGHTS)
    for key, allowed in _READ.items():
        if key in config and config[key] not in allowed:
            raise MXError(
                f"pt2mx reads no adapters with {key}={config[key]!r}: it reads plain LoRA, {key}={allowed[0]!r}"
            )
    tensors = {name.removeprefix(_BASE): tensor.float() for name, tensor in stored.items()}
    others = [name for name in tensors if not f".{name}".endswith((f".{DOWN}", f".{UP}"))]
    if others or not tensors:
        raise MXError(
            f"{str(folder / WEIGHTS)!r} holds {others[0] if others else 'no tensor'!r}: pt2mx reads {DOWN}, {UP}"
        )
    return config, tensors


def _module(name: str, layers: Collection[str]) -> str:
    """Return the linear layer of a name, or the only one whose name ends in it."""
    found = [name] if name in layers else [module for module in layers if module.endswith(f".{name}")]
    if len(found) != 1:
        raise MXError(
            f"the file has an adapter of {name!r}, which is the end of {len(found)} names of linear layers with packed "
            f"weights, not of one: {nearest(name, list(layers)[:20])}"
        )
    return found[0]


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha over the rank, or over its root (rsLoRA), by the first pattern that is the end of the name."""
    patterns = config.get("alpha_pattern") or {}
    matching = [alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)]
    alpha = matching[0] if matching else config.get("lora_alpha", 8)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
