"""Select the weights of a model that a quantizer would quantize, from its modules alone.

Nothing is traced, and parameters may be on the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pt2mx.algorithms.options import Algorithm
from pt2mx.errors import MXError
from pt2mx.pt2e.models.module_schemes import are_experts, tied_names
from pt2mx.pt2e.observe.qspec import mx_spec
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY
from pt2mx.pt2e.quantizer.annotate import REASON_KEY
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: class of a layer -> the operator that it calls
_OPERATORS = {
    "torch.nn.modules.linear.Linear": aten.linear,
    "torch.nn.modules.sparse.Embedding": aten.embedding,
    "transformers.pytorch_utils.Conv1D": aten.addmm,
    "transformers.models.falcon.modeling_falcon.FalconLinear": aten.linear,
}


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
    weights = dict(_weights(model))
    left = {name: "the caller excludes it" for name in weights if name.rpartition(".")[0] in skipped}
    for name, names in ({} if tied else tied_names(model)).items():
        if name in weights:
            left[name] = f"it is {', '.join(sorted(names - {name}))} too"
    graph = GraphModule(model, _graph(model, {name: row for name, row in weights.items() if name not in left}))
    with warnings.catch_warnings():
        # settings of operators that no module of the model calls
        warnings.filterwarnings("ignore", "the setting|kv_cache|none of the operators")
        quantizer.annotate(graph)
    chosen = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            specs = _specs(node)
            if isinstance(specs, str):
                left[node.meta["weight"]] = specs
            else:
                chosen[node.meta["weight"]] = specs
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
    return _OPERATORS.get(_kind(module)) is aten.linear


def as_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight of a layer as (..., out, in); of an embedding, (rows, width)."""
    return weight.mT if holds_columns(layer) else weight


def holds_columns(layer: nn.Module) -> bool:
    """Return True for a layer whose weight is (..., in, out): a Conv1D of transformers, the experts of gpt-oss."""
    return _OPERATORS.get(_kind(layer)) is aten.addmm or getattr(layer, "is_transposed", False)


def _weights(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, Callable]]]:
    """Yield weights with their layer and its operator.

    Only exact classes count, because a subclass may compute something else."""
    for path, module in model.named_modules():
        if are_experts(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.dim() == 3:
                    yield name, (module, aten._grouped_mm.default)
        elif _kind(module) in _OPERATORS:
            yield f"{path}.weight".removeprefix("."), (module, _OPERATORS[_kind(module)].default)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _graph(model: nn.Module, weights: dict[str, tuple[nn.Module, Callable]]) -> Graph:
    """Return a graph with one call per weight and its module stack, as export would make it."""
    graph = Graph()
    for i, (name, (layer, operator)) in enumerate(weights.items()):
        value = model.get_parameter(name)
        rows = value.new_empty(1, as_matrix(layer, value).shape[-1])
        weight, x = _node(graph, name, value), _node(graph, f"x_{i}", rows, "placeholder")
        arguments: tuple[Node | None, ...] = (x, weight)
        if operator is aten._grouped_mm.default:
            weight.meta["val"] = as_matrix(layer, value).mT  # (experts, in, out)
        elif operator is aten.embedding.default:
            arguments = weight, x
        else:
            bias = _node(graph, name.removesuffix("weight") + "bias", layer.bias) if layer.bias is not None else None
            arguments = (bias, x, weight) if operator is aten.addmm.default else (x, weight, bias)
        call = graph.call_function(operator, arguments)
        call.meta.update(val=rows, weight=name, nn_module_stack=_stack(model, name.rpartition(".")[0]))
    graph.output(None)
    return graph


def _node(graph: Graph, name: str, value: Any, op: str = "get_attr") -> Node:
    node = graph.create_node(op, name)
    node.meta["val"] = value
    return node


def _stack(model: nn.Module, name: str) -> dict[str, tuple[str, str]]:
    parts = name.split(".")
    paths = dict.fromkeys(["", *(".".join(parts[: end + 1]) for end in range(len(parts)))])
    return {path: (path, _kind(model.get_submodule(path))) for path in paths}


def _specs(call: Node) -> LayerSpecs | str:
    """Return the formats of a call, or the reason why it has none."""
    annotation = call.meta.get(Q_ANNOTATION_KEY)
    inputs = {} if annotation is None else annotation.input_qspec_map
    specs = {node.target if node.op == "get_attr" else node.op: mx_spec(qspec) for node, qspec in inputs.items()}
    weight, activation = specs.pop(call.meta["weight"], None), specs.pop("placeholder", None)
    if annotation is not None and (specs or annotation.output_qspec is not None):
        raise MXError(
            f"{call.meta['weight']}: the recipe names a format of a bias or an output, which a checkpoint of weights "
            "has no place for: name formats of weights and activations only"
        )
    if weight is None:
        return str(call.meta.get(REASON_KEY, "the recipe names no format of it"))
    return LayerSpecs(weight.replace(axis=-1), None if activation is None else activation.replace(axis=-1))
