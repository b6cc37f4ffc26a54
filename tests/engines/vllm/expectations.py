"""What vLLM 0.26.0 looks for in a checkpoint, as its source says: which modules it builds of a model, how a
`quantization_config` matches their names and classes, and which tensors they then have. vLLM itself is not needed.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from tests.language_models import transformers

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How vLLM builds an architecture.

    Args:
        fused: layers that it multiplies at once -> their names in a checkpoint.
        names: part of the names of modules in transformers -> in vLLM.
        mapper: part of the names that a configuration states -> in vLLM; patterns are not mapped.
        gate: the name of a router that is built with the configuration, as a linear layer; "" for none.
        one_tensor: True where it loads experts as one tensor a layer.
        float_head: True where its head is built without the configuration.
    """

    fused: Mapping[str, tuple[str, ...]]
    names: tuple[str, str] = ("", "")
    mapper: tuple[str, str] = ("", "")
    gate: str = ""
    one_tensor: bool = False
    float_head: bool = False


_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_DENSE = {**_QKV, "gate_up_proj": ("gate_proj", "up_proj")}
FAMILIES = {
    "llama": Family(_DENSE),
    "qwen2": Family(_DENSE),
    "qwen3_moe": Family(_DENSE, gate="gate"),
    "mixtral": Family(_QKV, names=(".mlp.", ".block_sparse_moe.")),
    "gpt_oss": Family(_QKV, (".self_attn.", ".attn."), (".self_attn.", ".attn."), one_tensor=True, float_head=True),
}

#: the classes of modules; those of linear layers contain "Linear"
LINEAR, HEAD, EMBEDDING, EXPERTS = "RowParallelLinear", "ParallelLMHead", "VocabParallelEmbedding", "RoutedExperts"


@dataclass(frozen=True)
class Module:
    """A module that vLLM builds: its name and class there, and the modules of the checkpoint that it holds."""

    name: str
    kind: str
    holds: tuple[str, ...]


class Refusal(Exception):
    """vLLM raises an error."""


#: the suffixes of tensors that a module has, after the name of each module that it holds; those in high precision
Suffixes = frozenset[str]
FLOAT = frozenset({"weight"})


def refusals(folder: Path) -> list[str]:
    """Return why vLLM does not load a checkpoint; empty where it finds the tensors that it looks for."""
    config = json.loads((folder / "config.json").read_text())
    family, quantization = FAMILIES[config["model_type"]], config["quantization_config"]
    stored = tensor_names(folder)
    reasons = []
    for module in modules_of(config, family, stored):
        try:
            is_plain = module.kind == HEAD and family.float_head
            expected = FLOAT if is_plain else METHODS[quantization["quant_method"]](quantization, family, module)
            if module.kind == EXPERTS and family.one_tensor:
                _check_one_tensor(module, expected, stored)
            else:
                _check_tensors(module, expected, stored)
        except Refusal as refusal:
            reasons.append(f"{module.name}: {refusal}")
    return reasons


def tensor_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def modules_of(config: Config, family: Family, stored: Collection[str]) -> list[Module]:
    """Return the modules with weights that vLLM builds with the configuration."""
    with torch.device("meta"):
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**plain))
    modules = []
    for name, layer in model.named_modules():
        there, last = name.replace(*family.names), name.rpartition(".")[2]
        if layer is model.get_output_embeddings():
            if not model.config.tie_word_embeddings:
                modules.append(Module(there, HEAD, (name,)))
        elif isinstance(layer, nn.Embedding):
            modules.append(Module("", EMBEDDING, (name,)))  # built without a name
        elif hasattr(layer, "is_transposed"):
            layers = {one.rpartition(".")[0] for one in stored if re.match(re.escape(there) + r"\.\d+\.", one)}
            modules.append(Module(there, EXPERTS, tuple(sorted(layers)) or (name,)))
        elif isinstance(layer, nn.Linear) or (last and last == family.gate):
            group = next((fused for fused, parts in family.fused.items() if last in parts), None)
            parts = family.fused.get(group, (last,))
            if last == parts[0]:
                holds = tuple(name.removesuffix(last) + part for part in parts)
                modules.append(Module(there.removesuffix(last) + (group or last), LINEAR, holds))
    return modules


def _check_tensors(module: Module, expected: Suffixes, stored: Collection[str]) -> None:
    for name in module.holds:
        held = {one.removeprefix(f"{name}.") for one in stored if one.startswith(f"{name}.")} - {"bias"}
        if held != expected:
            raise Refusal(f"it has {', '.join(sorted(expected))}, the checkpoint {', '.join(sorted(held))}")


def _check_one_tensor(module: Module, expected: Suffixes, stored: Collection[str]) -> None:
    suffixes = ("",) if expected == FLOAT else ("_blocks", "_scales")
    wanted = {f"{module.name}.{part}{suffix}" for part in ("gate_up_proj", "down_proj") for suffix in suffixes}
    if not wanted <= set(stored):
        raise Refusal(f"its loader looks for {', '.join(sorted(wanted))}")


def _mapped(names: Sequence[str], family: Family) -> list[str]:
    return [name if name.startswith("re:") or "." not in name else name.replace(*family.mapper) for name in names]


def _parts(module: Module, family: Family) -> list[str]:
    """Return the names of the layers that a layer fuses; its own name if it fuses none."""
    parent, _, last = module.name.rpartition(".")
    return [f"{parent}.{part}" for part in family.fused[last]] if last in family.fused else [module.name]


def _all_or_none(values: Sequence[Any], module: Module) -> Any:
    if any(value != values[0] for value in values):
        raise Refusal("the layers that it holds have several schemes")
    return values[0]


# ---- compressed-tensors


def _equal_or_pattern(name: str, target: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else name == target


def _matched(name: str, module: Module, family: Family, targets: Sequence[str]) -> str | None:
    """Return the target of a module: by its name, then by its class, then by the layers that it fuses."""
    by_name = [target for target in targets if _equal_or_pattern(name, target)]
    by_class = [t for t in targets if not t.startswith("re:") and t.lower() in module.kind.lower()]
    if by_name or by_class:
        return (by_name + by_class)[0]
    of_parts = [next((t for t in targets if _equal_or_pattern(part, t)), None) for part in _parts(module, family)]
    return of_parts[0] if name == module.name and all(of_parts) else None


def _ignored(names: Sequence[str], module: Module, ignore: Sequence[str]) -> bool:
    return _all_or_none([any(_equal_or_pattern(name, one) for one in ignore) for name in names], module)


def _scheme(weights: Config, inputs: Config | None) -> Suffixes:
    kind = weights["strategy"], weights["num_bits"], weights["group_size"]
    suffixes = {
        ("group", 4, 32): {"weight_packed", "weight_scale"},
        ("group", 8, 32): {"weight", "weight_scale"},
        ("tensor_group", 4, 16): {"weight_packed", "weight_scale", "weight_global_scale"},
    }
    if kind not in suffixes:
        raise Refusal(f"no scheme has {weights['num_bits']} bits")
    return frozenset(suffixes[kind] | ({"input_global_scale"} if inputs and kind[0] == "tensor_group" else set()))


def _compressed_tensors(config: Config, family: Family, module: Module) -> Suffixes:
    ignore = _mapped(config["ignore"], family)
    groups = {
        target: group for group in config["config_groups"].values() for target in _mapped(group["targets"], family)
    }
    if module.kind == EXPERTS:
        groups |= {EXPERTS: groups["Linear"]} if "Linear" in groups else {}
        names = [f"{module.name}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    else:
        names = [module.name]
    schemes = []
    for name in names:
        parts = _parts(module, family) if name == module.name else [name]
        if name in ignore or _ignored(parts, module, ignore):
            schemes.append(FLOAT)
            continue
        target = _matched(name, module, family, list(groups))
        group = groups.get(target)
        if group is not None and module.kind == EMBEDDING:
            raise Refusal("embeddings are integers")
        schemes.append(FLOAT if group is None else _scheme(group["weights"], group["input_activations"]))
    return _all_or_none(schemes, module)


# ---- the other methods


def _skipped(module: Module, family: Family, ignored: Sequence[str]) -> bool:
    if module.name.endswith("experts"):
        return any(module.name in name for name in ignored)
    return _all_or_none([part in ignored for part in _parts(module, family)], module)


def _modelopt(config: Config, family: Family, module: Module) -> Suffixes:
    algorithms = {
        "MXFP8": {"weight", "weight_scale"},
        "FP8_PB_WO": {"weight", "weight_scale"},
        "NVFP4": {"weight", "weight_scale", "weight_scale_2", "input_scale"},
        "W4A16_NVFP4": {"weight", "weight_scale", "weight_scale_2"},
    }
    excluded = [name.replace(*family.mapper) for name in config["ignore"]]
    is_excluded = _skipped(module, family, excluded) or any(
        (one != module.name and one in module.name) or fnmatch.fnmatch(module.name, one) for one in excluded
    )
    if not is_excluded and module.kind == HEAD and config["quant_algo"] == "FP8_PB_WO":
        raise Refusal("heads have one scale a row")
    return FLOAT if is_excluded or module.kind == EMBEDDING else frozenset(algorithms[config["quant_algo"]])


def _quark(config: Config, family: Family, module: Module) -> Suffixes:
    exclude = [name.replace(*family.mapper) for name in config["exclude"]]
    inside = module.kind == EXPERTS and any(one.startswith(f"{module.name}.") for one in exclude)
    if inside or _ignored(_parts(module, family), module, exclude) or module.kind in (HEAD, EMBEDDING):
        return FLOAT
    layers = {name.replace(*family.mapper): layer for name, layer in config["layer_quant_config"].items()}
    of_parts = [
        next((layer for name, layer in layers.items() if part in name), config["global_quant_config"])
        for part in _parts(module, family)
    ]
    if _all_or_none(of_parts, module)["weight"]["dtype"] not in ("fp4", "fp6_e2m3", "fp6_e3m2"):
        raise Refusal("it has no scheme of this dtype")
    return frozenset({"weight", "weight_scale"})


def _fp8(config: Config, family: Family, module: Module) -> Suffixes:
    if config["weight_block_size"][0] == 1:
        raise Refusal("it has no scheme for blocks of one row")
    skipped = module.kind in (HEAD, EMBEDDING) or _skipped(module, family, config["modules_to_not_convert"])
    return FLOAT if skipped else frozenset({"weight", "weight_scale_inv"})


def _mxfp8(config: Config, family: Family, module: Module) -> Suffixes:
    """Return the tensors of ModelOpt's MXFP8, for which vLLM takes this method."""
    return _modelopt({"ignore": config.get("ignored_layers", []), "quant_algo": "MXFP8"}, family, module)


def _mxfp4(config: Config, family: Family, module: Module) -> Suffixes:
    return frozenset({"weight", "weight_scale"}) if module.kind == EXPERTS else FLOAT


METHODS: dict[str, Callable[[Config, Family, Module], Suffixes]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
}
