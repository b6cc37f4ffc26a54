"""The graph of a converted model for transformers' `OpenVINOExporter`, and weights in OpenVINO's own types.

The exporter converts a graph of aten operators. Quantized activations become float arithmetic. A weight in MXFP4, MXFP8
or MXINT8 stays packed: a constant of OpenVINO's element type and one of E8M0 scales, which are converted and
multiplied. OpenVINO's plugins recognize compressed weights by this form.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.formats import parse_element
from pt2mx.fx.graph.graph_pass import run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Dequantize, shape_of
from pt2mx.fx.graph.tensors import delete_unused_tensors
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq, merge_fake_quantize
from pt2mx.fx.portable import without_bit_casts
from pt2mx.fx.shifts import without_shifts
from pt2mx.kernels.packing import pack, unpack
from pt2mx.pt2e.files.user_errors import quiet_export
from pt2mx.pt2e.program.sizes import dynamic_shapes

#: element -> OpenVINO's type of its codes
_TYPES = {"fp4_e2m1": "f4e2m1", "fp8_e4m3": "f8e4m3", "fp8_e5m2": "f8e5m2", "int8": "i8", "int8_full": "i8"}
_ELEMENTS = list(_TYPES)


@torch.library.custom_op("pt2mx_openvino::weight", mutates_args=())
def weight(codes: Tensor, scale: Tensor, element: int, block_size: int, axis: int, length: int) -> Tensor:
    """Dequantize to float32, with plain numbers as arguments; `element` counts `_ELEMENTS`.

    codes: (..., bytes, ...) uint8, scale: (..., length / block_size, ...) uint8 -> (..., length, ...).
    """
    return ops.dequantize_mx(codes, scale, _ELEMENTS[element], block_size, torch.float32, axis, length)


@weight.register_fake
def _(codes: Tensor, scale: Tensor, element: int, block_size: int, axis: int, length: int) -> Tensor:
    shape = [*codes.shape]
    shape[axis] = length
    return codes.new_empty(shape, dtype=torch.float32)


def openvino_graph(program: ExportedProgram) -> GraphModule:
    """Return the graph in operators that OpenVINO's frontend converts, and register the conversion of `weight`.

    Raises:
        MXError: for a version of transformers whose exporter takes no conversions.
    """
    _register()
    model = program.module()
    for graph in graph_modules(model):
        run_passes(graph, (cse_quantize, fuse_qdq, merge_fake_quantize))
        for node in list(graph.graph.nodes):
            _use_native_types(node)
        graph.recompile()
    delete_unused_tensors(model)
    args, kwargs = program.example_inputs
    with quiet_export(), torch.no_grad():
        again = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes(program, model))
    return without_shifts(without_bit_casts(again)).module()


def _use_native_types(node: Node) -> None:
    """Replace a dequantized constant in float32, of whole blocks, by `weight` where OpenVINO has the types."""
    call, shape = Dequantize.of(node), shape_of(node)
    if call is None or shape is None or not all(_is_constant(n) for n in (call.codes, call.scale)):
        return
    axis = call.spec.axis % len(shape)
    length = shape[axis]
    if not isinstance(length, int) or length % min(call.spec.block_size, length) or call.dtype != torch.float32:
        return
    element = call.spec.element.name
    if element in _TYPES and call.spec.has_plain_scale:
        node.target, node.kwargs = torch.ops.pt2mx_openvino.weight.default, {}
        node.args = (call.codes, call.scale, _ELEMENTS.index(element), call.spec.block_size, axis, length)


def _is_constant(node: object) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


@functools.cache
def _register() -> None:
    from openvino.frontend.pytorch import ConversionExtension
    from transformers.exporters import exporter_openvino

    extensions = getattr(exporter_openvino, "_OV_CONVERSION_EXTENSIONS", None)
    if not isinstance(extensions, list):
        raise MXError("this version of transformers takes no conversions for OpenVINO: install transformers 5.24")
    extensions.append(ConversionExtension("pt2mx_openvino.weight.default", _convert))


def _convert(context: Any) -> list[Any]:
    """Convert a call of `weight` whose codes and scale are constants."""
    import openvino
    from openvino import opset14 as op

    codes, scale = (torch.tensor(context.get_input(i).get_node().data) for i in (0, 1))
    element, block_size, axis, length = (int(context.get_values_from_const_input(i)) for i in range(2, 6))
    name = _ELEMENTS[element]
    bits = parse_element(name).bits
    codes = unpack(codes, axis, bits).narrow(axis, 0, length)
    shape, block = list(codes.shape), min(block_size, length)
    split = [*shape[:axis], length // block, block, *shape[axis + 1 :]]  # (..., blocks, block, ...)
    scales = [*shape[:axis], length // block, 1, *shape[axis + 1 :]]  # (..., blocks, 1, ...)
    raw = pack(codes.flatten(), 0, bits) if bits < 8 else codes.to(torch.uint8)
    values = op.convert(_constant(openvino, raw, split, _TYPES[name]), "f32")
    if parse_element(name).is_int:  # the unit of a code is 2**-6
        units = torch.ldexp(torch.tensor(2.0**-6), scale.int() - 127).masked_fill(scale == 255, float("nan"))
        factors = op.constant(units.reshape(scales).numpy())
    else:
        factors = op.convert(_constant(openvino, scale, scales, "f8e8m0"), "f32")
    product = op.multiply(values, factors)
    return [op.reshape(product, op.constant(shape, dtype="int64"), special_zero=False).output(0)]


def _constant(openvino: Any, raw: Tensor, shape: list[int], kind: str) -> Any:
    """Return a constant of an OpenVINO type with these bytes."""
    array = raw.contiguous().numpy().reshape(-1)
    tensor = openvino.Tensor(getattr(openvino.Type, kind), openvino.Shape(shape))
    tensor.data.view("uint8").reshape(-1)[:] = array
    return openvino.opset14.constant(tensor)
