"""Select the weights of a model that a quantizer would quantize, from its modules alone.

Nothing is traced, and parameters may be on the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pt2mx.algorithms.options import Algorithm
from pt2mx.errors import MXError
from pt2mx.pt2e.models.module_schemes import are_experts, tied_names
from pt2mx.pt2e.quantizer.annotate import OUTPUT, reason_unfit
from pt2mx.pt2e.quantizer.operators import fixed_operands
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.settings import CallNumbers, Choice, Site, type_key
from pt2mx.spec import MXSpec

#: class of a layer -> the operator that it calls
_OPERATORS = {
    "torch.nn.modules.linear.Linear": "aten.linear",
    "torch.nn.modules.sparse.Embedding": "aten.embedding",
    "transformers.pytorch_utils.Conv1D": "aten.addmm",
    "transformers.models.falcon.modeling_falcon.FalconLinear": "aten.linear",
}
#: the operator of experts, whose weights are (experts, ...)
_EXPERTS = "aten._grouped_mm"


@dataclass(frozen=True)
class LayerSpecs:
    """The formats of a layer's weight and input, along the dimension that it reduces; None: high precision."""

    weight: MXSpec
    activation: MXSpec | None = None


@dataclass(frozen=True)
class Selection:
    """The weights of linear layers, embeddings and experts, by name: those to quantize, and the reasons for others."""

    chosen: dict[str, LayerSpecs]
    left: dict[str, str]


def select_weights(
    model: nn.Module, quantizer: MXQuantizer, skipped: Container[str] = (), tied: bool = False
) -> Selection:
    """Ask a quantizer for the formats of a model's weights, as if the model had been exported.

    "First" and "last" refer to the order in which the model defines its modules.

    Args:
        model: a model of transformers or another library.
        quantizer: the quantizer.
        skipped: names of modules to skip.
        tied: True: select a weight that several modules share, for each of them; False: skip it.

    Returns:
        The selection.

    Raises:
        MXError: for a model in float64, and for a format of a bias or an output.
    """
    operators = _operators(model)
    left = {name: "the caller excludes it" for name in operators if name.rpartition(".")[0] in skipped}
    for name, names in ({} if tied else tied_names(model)).items():
        if name in operators:
            left[name] = f"it is {', '.join(sorted(names - {name}))} too"
    sites = sites_of(model, {name: operator for name, operator in operators.items() if name not in left})

    def planned(name: str, choice: Choice) -> _Plan:
        return _planned(model, name, sites[name], choice)

    with warnings.catch_warnings():
        # settings of operators that no module of the model calls
        warnings.filterwarnings("ignore", "the setting|kv_cache")
        plans = quantizer.plan(sites, sites, planned)
    chosen = {}
    for name, plan in plans.items():
        if plan.specs.keys() - {"weight", "activation"}:
            raise MXError(
                f"{name}: the recipe names a format of a bias or an output, which a checkpoint of weights has no place "
                "for: name formats of weights and activations only"
            )
        if "weight" in plan.specs:
            chosen[name] = LayerSpecs(**plan.specs)
        else:
            left[name] = plan.reason or "the recipe names no format of it"
    return Selection(chosen, left)


def check_weights_only(quantizer: MXQuantizer, supported: tuple[type[Algorithm], ...] = ()) -> None:
    """Raise an `MXError` for a recipe with a cache format, or with algorithms that are not in `supported`."""
    others = [one for one in quantizer.algorithms or () if not isinstance(one, supported)]
    if others or quantizer.kv_cache is not None:
        names = [type(one).__name__ for one in others] + ["a kv_cache"] * (quantizer.kv_cache is not None)
        raise MXError(
            f"the recipe has {', '.join(names)}, which is not applied to weights of a checkpoint: take a recipe "
            "without, such as 'mxfp4_weight_only', or pt2mx.quantize_language_model"
        )


def is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer whose weight is (out, in)."""
    return _OPERATORS.get(type_key(type(module))) == "aten.linear"


def as_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight of a layer as (..., out, in); of an embedding, (rows, width)."""
    return weight.mT if holds_columns(layer) else weight


def holds_columns(layer: nn.Module) -> bool:
    """Return True for a layer whose weight is (..., in, out): a Conv1D of transformers, the experts of gpt-oss."""
    return _OPERATORS.get(type_key(type(layer))) == "aten.addmm" or getattr(layer, "is_transposed", False)


def sites_of(model: nn.Module, operators: Mapping[str, str]) -> dict[str, Site]:
    """Return the sites of the calls that use weights of a model, as export would find them.

    Args:
        model: the model.
        operators: name of a weight -> the operator that its layer calls, in the order of the calls.
    """
    numbers = CallNumbers()
    sites = {}
    for name, operator in operators.items():
        path = _path(name.rpartition(".")[0])
        types = tuple(type_key(type(model.get_submodule(module))) for module in path)
        modules = list(zip(path, path, types, strict=True))  # each module is called once
        sites[name] = Site(
            operator=operator,
            path=path,
            module_types=types,
            order=numbers.order(modules, name, operator),
            parameters=model.get_parameter(name).numel(),
            call=model.get_submodule(path[-1]),
        )
    return sites


def _path(name: str) -> tuple[str, ...]:
    """Return the names of the modules around a module, the model's "" first, and its own."""
    parts = name.split(".") if name else []
    return ("", *(".".join(parts[: end + 1]) for end in range(len(parts))))


def _operators(model: nn.Module) -> dict[str, str]:
    """Return the weights by name, each with the operator of its layer.

    Only exact classes count, because a subclass may compute something else."""
    operators = {}
    for path, module in model.named_modules():
        operator = _OPERATORS.get(type_key(type(module)))
        if are_experts(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.dim() == 3:
                    operators[name] = _EXPERTS
        elif operator is not None:
            operators[f"{path}.weight".removeprefix(".")] = operator
    return operators


@dataclass(frozen=True)
class _Plan:
    """The format of each role of a layer's operands, and the reason why others have none."""

    specs: dict[str, MXSpec]
    reason: str

    def __bool__(self) -> bool:
        return bool(self.specs)


def _planned(model: nn.Module, name: str, site: Site, choice: Choice) -> _Plan:
    """Plan the operands of a layer, all in blocks along the last dimension: the one that it reduces."""
    config = choice.config
    if config is None:
        return _Plan({}, choice.reason)
    layer = model.get_submodule(site.path[-1])
    weight = as_matrix(layer, model.get_parameter(name))
    row = weight.new_empty(1, weight.shape[-1])
    specs: dict[str, MXSpec] = {}
    reasons: dict[str, None] = {}
    # role -> the tensor and its name
    tensors = {
        "activation": (row, f"the input of {name}"),
        "weight": (weight, name),
        "output": (row, f"the output of {name}"),
    }
    bias = getattr(layer, "bias", None)  # experts do not pass it to the operator
    if isinstance(bias, Tensor) and site.operator != _EXPERTS:
        tensors["bias"] = (bias, f"{name.removesuffix('weight')}bias")
    for operand in (*fixed_operands(site.operator), OUTPUT):
        role = operand.role
        if role == "operand":
            role = "activation" if operand.name == "input" else "weight"
        spec = config.spec_of(operand.name, role)
        if spec is None or role not in tensors:
            continue
        tensor, tensor_name = tensors[role]
        reason = reason_unfit(tensor_name, tensor, name, replace(operand, axis=-1), spec)
        if reason is None:
            specs[role] = spec.replace(axis=-1)
        elif role != "output":
            reasons[reason] = None
    if not specs and not reasons:
        return _Plan({}, "the config names no spec for its operands")
    return _Plan(specs, "; ".join(reasons))
