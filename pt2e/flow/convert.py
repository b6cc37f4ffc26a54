"""`convert_pt2e`: torchao's conversion, with the steps that it lacks for MX."""

from __future__ import annotations

import operator
import warnings

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2mx.errors import MXError, listed
from pt2mx.fx.graph.constants import hoist_tensor_scales
from pt2mx.fx.graph.higher_order_ops import graph_modules, hop_calls
from pt2mx.fx.graph.node import write_out_arguments
from pt2mx.fx.graph.tensors import copy_sharing_tensors, generate_code, map_tensors, storages_of
from pt2mx.fx.passes.fold_weights import fold_all_weights, fold_biases
from pt2mx.fx.training.train_eval import to_evaluation
from pt2mx.pt2e.flow.accumulators import convert_accumulators, remove_accumulators
from pt2mx.pt2e.flow.prepare import INITIAL_KEY
from pt2mx.pt2e.flow.weights import nonfinite_weights, note_weights
from pt2mx.pt2e.observe import torchao_pt2e
from pt2mx.pt2e.observe.observer import MXObserver


def convert_pt2e(model: GraphModule, fold_quantize: bool = True) -> GraphModule:
    """Replace the observers of a prepared model by `quantize_mx`/`dequantize_mx` pairs.

    Args:
        model: a result of `prepare_pt2e` or `prepare_qat_pt2e`, calibrated or trained. It does not change.
        fold_quantize: True quantizes the weights now: packed uint8 buffers `<weight>_data` and `<weight>_scale` replace
            the float weights. With False the converted model quantizes its weights in every call.

    Returns:
        The converted model, another graph module. In eager mode its output is bit-identical to the output of `model`
        with fake quantization on. It can be exported, saved, compiled and moved, but not trained: its parameters
        require no gradient. Buffers that calibration wrote (a cache) have their values from the preparation. A warning
        names weights with a NaN or an Inf.

    Raises:
        MXError: for a model that is not prepared, or was cast to another dtype since.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> _ = prepared(x)  # calibration
        >>> converted = pt2mx.convert_pt2e(prepared)
        >>> {name: tuple(buffer.shape) for name, buffer in converted.named_buffers()}  # bytes: two FP4 codes in one
        {'weight_scale': (8, 2), 'weight_data': (8, 32)}
        >>> converted(x).shape
        torch.Size([1, 8])
    """
    if not isinstance(model, GraphModule) or not torchao_pt2e.is_prepared(model):
        raise MXError(
            f"expected a prepared model, not {type(model).__name__}: "
            "pass what prepare_pt2e or prepare_qat_pt2e returned"
        )
    if not isinstance(fold_quantize, bool):
        raise MXError(f"fold_quantize={fold_quantize!r} must be True or False")
    _check_dtypes(model)
    converted = generate_code(_convert(model, fold_quantize))
    if names := nonfinite_weights(converted):
        warnings.warn(f"NaN or Inf in {listed(names)}: blocks that hold such become NaN as a whole", stacklevel=2)
    return converted


def _convert(model: GraphModule, fold_quantize: bool) -> GraphModule:
    meta, shared = dict(model.meta), storages_of(model)
    model = copy_sharing_tensors(model, delays_code=True)
    _reset_buffers(model, meta.pop(INITIAL_KEY, {}))
    for module in model.modules():
        if isinstance(module, MXObserver):
            module.folds_weights = False  # fold_all_weights does, below
    note_weights(model)
    try:
        converted = _convert_graphs(model, {})
    finally:
        torchao_pt2e.forget_models()
    converted.meta.update(meta)
    hoist_tensor_scales(converted)
    if fold_quantize:
        fold_all_weights(converted)
    for graph in graph_modules(converted):
        torchao_pt2e.forget_prepared(graph)
        write_out_arguments(graph)
    # further training of the prepared model must not change the converted one
    map_tensors(converted, Tensor.clone, shared)
    return converted


def _check_dtypes(model: GraphModule) -> None:
    """Raise an error for a model that was cast: its graph still computes in the dtypes of the export."""
    for node in model.graph.find_nodes(op="get_attr"):
        exported, tensor = node.meta.get("val"), operator.attrgetter(node.target)(model)
        if isinstance(exported, Tensor) and isinstance(tensor, Tensor) and tensor.dtype != exported.dtype:
            raise MXError(
                f"{node.target} is {tensor.dtype} and was exported in {exported.dtype}: cast the float model, then "
                "export and prepare it again"
            )


def _reset_buffers(model: GraphModule, initial: dict[str, Tensor]) -> None:
    """Reset the buffers that calibration wrote, such as a cache, to their values at preparation."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    with torch.no_grad():
        for name, value in initial.items():
            _without_repetitions(named[name]).copy_(_without_repetitions(value.expand_as(named[name])))


def _without_repetitions(x: Tensor) -> Tensor:
    """Return x without the repetitions of expanded dimensions: torch refuses to write them."""
    return x[tuple(slice(None if step else 1) for step in x.stride())]


def _convert_graphs(model: GraphModule, done: dict[GraphModule, GraphModule]) -> GraphModule:
    """Convert a graph and its subgraphs, each once."""
    inner = {}
    for call in hop_calls(model):
        for name, graph in call.graphs:
            if graph not in done:
                done[graph] = _convert_graphs(graph, done)
            inner[name] = done[graph]
    for name in inner:
        setattr(model, name, nn.Module())  # torchao's convert would delete the modules in it
    remove_accumulators(model)
    to_evaluation(model)
    converted = torchao_pt2e.convert_modules(model)
    for name, graph in inner.items():
        setattr(converted, name, graph)
    convert_accumulators(converted)
    fold_biases(converted)
    return converted
