"""`add_lora`: add low-rank adapters to the linear layers of a converted model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError, check_integer
from pt2mx.fx.graph.constants import constant_nodes, mark_constants
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Dequantize, LinearMX, write_out_arguments
from pt2mx.fx.graph.qdq import quantize_of, unlike_converted
from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_tensors, move_to_device
from pt2mx.fx.passes.packed_operands import GATHERS
from pt2mx.fx.training.packed_operands import use_packed_operators
from pt2mx.pt2e.flow.packed_weights import converted_graph
from pt2mx.pt2e.lora.adapters import adapters_of, insert_adapter, linear_layers
from pt2mx.pt2e.lora.targets import ALL_LINEAR, targeted


def add_lora(
    model: GraphModule | ExportedProgram,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] = ALL_LINEAR,
) -> GraphModule:
    """Add low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) to the linear layers of a converted model.

    A layer then computes `layer(x) + alpha / rank * (x @ A.T) @ B.T`, where x is the input before the flow rotates and
    quantizes it. A and B alone are trained. Codes and scales stay packed, also in the backward pass, which dequantizes
    each weight for its own product. A is random, from torch's generator, as in peft; B is zero.

    Args:
        model: what `convert_pt2e` returned, or an export of it, such as the `program` of a `LanguageModel`; or what
            `add_lora` returned, for further layers. It does not change, and the result shares its codes.
        rank: the rank of the adapters, at least 1.
        alpha: the scale of the updates times the rank.
        targets: "all-linear": every linear layer with a packed weight; another string: a regular expression for the
            whole name of a module; or a list of names or ends of names, such as ["q_proj", "v_proj"].

    Returns:
        Another graph module, whose parameters `<module>.lora_A.weight`, (rank, K), and `<module>.lora_B.weight`,
        (N, rank), float32, require a gradient; products with them are in the dtype of x. It can be trained, exported,
        compiled and lowered. In eager mode its matmuls are those of `lower_to_inductor`: their sums have another order
        than the converted model's.

    Raises:
        MXError: for a model that is not converted or is lowered, one with a quantized cache, a rank below 1, an alpha
            that is not positive and finite, a target that matches no module (with the nearest names) or none but
            others (with what they are), one that matches a linear layer in float, and a layer that has an adapter.

    Example:
        >>> import torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> lora = pt2mx.add_lora(pt2mx.convert_pt2e(prepared), rank=4)
        >>> {name: tuple(p.shape) for name, p in lora.named_parameters() if p.requires_grad}
        {'0.lora_A.weight': (4, 64), '0.lora_B.weight': (32, 4)}
    """
    check_integer("rank", rank, least=1)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise MXError(f"alpha={alpha!r} must be a finite number above 0")
    graph = trainable_graph(model)
    modules = targeted(graph, linear_layers(graph), targets)
    return add_adapters(graph, dict.fromkeys(modules, (rank, alpha / rank)))


def trainable_graph(model: GraphModule | ExportedProgram) -> GraphModule:
    """Return a copy of a converted graph, or of one with adapters, whose operators read codes in training.

    Raises:
        MXError: for another model, a lowered one, and one that stores codes that it computes, as in a quantized cache.
    """
    graph = copy_sharing_tensors(converted_graph(model))
    if kind := unlike_converted(graph, graph.state_dict()):
        raise MXError(f"expected a converted model, not {kind}: pass what convert_pt2e returned")
    devices = {tensor.device for tensor in graph.state_dict().values()}
    if len(devices) == 1:  # where model.to() has put it; the graph itself still names that of the export
        move_to_device(graph, devices.pop())
    map_tensors(graph, Tensor.detach)
    if not adapters_of(graph):
        if any(LinearMX.calls_in(graph.graph)):
            raise MXError("expected a converted model, not a lowered one: pass what convert_pt2e returned")
        use_packed_operators(graph)
    mark_constants(graph)
    for each in graph_modules(graph):
        _check_gradients(each)
    return graph


def add_adapters(graph: GraphModule, chosen: Mapping[str, tuple[int, float]]) -> GraphModule:
    """Add adapters to a trainable graph, whose only trained parameters are adapters then, in memory of their own.
    Changes the graph and returns it.

    chosen: module -> rank and scaling of its adapter.
    """
    layers = linear_layers(graph)
    if taken := adapters_of(graph).keys() & chosen:
        raise MXError(f"{min(taken)!r} has an adapter: name other layers, or add all adapters to the converted model")
    for module, (rank, scaling) in chosen.items():
        insert_adapter(graph, module, layers[module], rank, scaling)
    for adapter in adapters_of(graph).values():
        for factor in (adapter.down, adapter.up):
            factor.data = factor.detach().clone()
            factor.requires_grad_()
    write_out_arguments(graph)
    graph.recompile()
    return graph


def _check_gradients(graph: GraphModule) -> None:
    """Raise an MXError for codes that are neither of a weight nor quantized in the graph: they pass no gradient."""
    constants = constant_nodes(graph.graph)
    for node, call in Dequantize.calls_in(graph.graph):
        codes = call.codes.args[0] if call.codes.target in GATHERS else call.codes
        if codes not in constants and quantize_of(node) is None:
            raise MXError(
                f"{node} reads codes that the program stores, as a quantized cache does, and they pass no gradient: "
                "quantize the model without such a cache"
            )
