"""`lower_to_inductor`: the graph passes that make a converted program small and fast under Inductor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.graph_pass import GraphPass, run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import write_out_arguments
from pt2mx.fx.graph.qdq import unlike_converted
from pt2mx.fx.graph.source_node import note_source_nodes
from pt2mx.fx.graph.tensors import (
    copy_sharing_tensors,
    delete_unused_tensors,
    generate_code,
    map_tensors,
    move_to_device,
)
from pt2mx.fx.passes.activation_matmuls_bf16 import use_bf16_activation_matmuls
from pt2mx.fx.passes.bf16_matmul import use_bf16_matmul, use_bfloat16_tensor_cores
from pt2mx.fx.passes.cache_writes import fuse_cache_writes
from pt2mx.fx.passes.convolutions_as_matmuls import use_matmuls_for_convolutions
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.fp8_rowwise import use_fp8_rowwise
from pt2mx.fx.passes.fuse_activation_quantize import fuse_activation_quantize, sink_bias
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq, merge_fake_quantize
from pt2mx.fx.passes.fuse_quantize_epilogue import fuse_quantize_epilogue
from pt2mx.fx.passes.fuse_rotation import fuse_rotation
from pt2mx.fx.passes.interleave_gates import interleave_gates
from pt2mx.fx.passes.merge_linears import merge_linears
from pt2mx.fx.passes.packed_operands import use_packed_attention, use_packed_embeddings, use_packed_weights
from pt2mx.fx.passes.scaled_mm import use_scaled_mm
from pt2mx.fx.passes.unpack_weights import unpack_weights
from pt2mx.fx.passes.weight_layout import make_weights_k_major, use_mma_layout
from pt2mx.kernels.select import USES


class LoweringPass(NamedTuple):
    """A pass of the lowering, and when it runs.

    Args:
        graph_pass: the function that changes a graph.
        needs_weights: True if the pass needs weights that the graph holds. In a graph that torch.compile traced,
            weights are inputs, and such a pass does not run.
        option: the argument of `lower_to_inductor` that enables the pass; None for a pass that always runs.
        use: what the pass does (`pt2mx.kernels.select.USES`), if it does nothing else: it runs for the types of devices
            that have kernels for this.
    """

    graph_pass: GraphPass
    needs_weights: bool = False
    option: str | None = None
    use: str | None = None


#: the passes over each graph, in this order
PASSES = (
    LoweringPass(cse_quantize),
    LoweringPass(fuse_qdq),
    LoweringPass(make_weights_k_major, needs_weights=True),
    LoweringPass(use_packed_attention),
    LoweringPass(fuse_cache_writes),
    LoweringPass(use_packed_embeddings),
    LoweringPass(use_packed_weights),
    LoweringPass(merge_linears, needs_weights=True),
    LoweringPass(use_fp8_rowwise, needs_weights=True, option="unpack"),
    LoweringPass(merge_fake_quantize),
    LoweringPass(sink_bias),
    LoweringPass(use_scaled_mm, needs_weights=True, option="scaled_mm"),
    LoweringPass(fuse_rotation),
    LoweringPass(use_bf16_matmul),
    LoweringPass(use_bfloat16_tensor_cores, needs_weights=True),
    LoweringPass(use_bf16_activation_matmuls),
    LoweringPass(use_matmuls_for_convolutions, needs_weights=True),
    LoweringPass(fuse_activation_quantize),
    LoweringPass(unpack_weights, needs_weights=True, option="unpack"),
    LoweringPass(fuse_quantize_epilogue),
    LoweringPass(interleave_gates, needs_weights=True, use="multiply weights in the MMA layout"),
    LoweringPass(use_mma_layout, needs_weights=True, use="multiply weights in the MMA layout"),
)


def lower_to_inductor(
    converted: GraphModule,
    device: torch.device | str | None = None,
    scaled_mm: bool = False,
    unpack: bool = False,
) -> GraphModule:
    """Rewrite a converted model for `torch.compile` and AOTInductor.

    Each quantized activation becomes one `fake_quantize_mx`. Linear layers, matmuls and grouped matmuls read packed
    weights (`linear_mx`, `grouped_linear_mx`); linear layers of one input are merged; embeddings gather packed rows.
    Weights that were not folded yet are folded. An operator that no pass rewrites, such as some convolutions,
    dequantizes its weight at each call (unless `unpack`) and compiles through the decompositions of pt2mx's operators.

    Args:
        converted: the model that `convert_pt2e` returned, or the module of a program that was exported from it, saved
            or loaded. It does not change; the result shares the tensors that the passes leave unchanged.
        device: the device on which the result runs; by default `converted`'s device.
        scaled_mm: use MX tensor cores, where the GPU has them (`use_scaled_mm`); untested on hardware.
            False by default.
        unpack: dequantize weights once (`unpack_weights`). They then take the memory of the float model. This is
            fastest where matmuls have many rows, as in a vision model or an encoder with quantized activations. GPUs
            with FP8 tensor cores use those for elements of 4 and 6 bits, with 8-bit weights (`use_fp8_rowwise`); such
            matmuls have no gradient. If only weights were quantized, the result may hold no quantized tensor, and
            cannot be lowered again. False by default.

    Returns:
        The lowered model. Activations and embeddings keep their bits; matmuls may sum in another order. It can be
        exported, saved, copied and compiled; `torch.autocast` around it casts packed matmuls as linear layers.
        `quantization_report` raises for it: pass the converted model.

    Raises:
        MXError: for an object that is no converted model, a model without quantized tensors, and a device that this
            machine lacks.

    Example:
        >>> import torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> y = prepared(x)
        >>> converted = pt2mx.convert_pt2e(prepared)
        >>> lowered = pt2mx.lower_to_inductor(converted)
        >>> lowered.get_buffer("0.weight_data").shape, lowered.get_buffer("0.weight_data").dtype
        (torch.Size([32, 32]), torch.uint8)
        >>> "linear_mx" in lowered.code, torch.allclose(lowered(x), converted(x), atol=1e-5)
        (True, True)
    """
    _check_converted(converted)
    model = copy_sharing_tensors(converted, delays_code=True)
    map_tensors(model, Tensor.detach)
    if device is not None:
        move_to_device(model, device)
    fold_all_weights(model)
    asked = {None: True, "scaled_mm": scaled_mm, "unpack": unpack}
    devices = {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]}
    passes = []
    for entry in PASSES:
        is_used = entry.use is None or not devices.isdisjoint(USES[entry.use])
        if asked[entry.option] and is_used:
            passes.append(entry.graph_pass)
    for graph in graph_modules(model):
        note_source_nodes(graph.graph)
        run_passes(graph, passes)
        write_out_arguments(graph)
    delete_unused_tensors(model)
    return generate_code(model)


def _check_converted(model: object) -> None:
    kind = unlike_converted(model, model.state_dict()) if isinstance(model, GraphModule) else type(model).__name__
    if kind is not None:
        raise MXError(
            f"expected a converted graph module, not {kind}: pass what convert_pt2e returned; torch.compile takes a "
            "portable program as it is"
        )
