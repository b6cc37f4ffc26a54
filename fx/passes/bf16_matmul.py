"""Multiply quantized float32 activations exactly in bfloat16, by instructions of the CPU or tensor cores of a GPU."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    Dequantize,
    FakeQuantize,
    GroupedLinearMX,
    LinearMX,
    RotatedFakeQuantize,
    dtype_of,
    inherit_location,
    set_value,
    shape_of,
    tensor_of,
    value_of,
)
from pt2mx.kernels.select import supports
from pt2mx.modes import ROUNDINGS

aten = torch.ops.aten
#: operators whose results bfloat16 may represent
QUANTIZED = (FakeQuantize, RotatedFakeQuantize, Dequantize)

_Matmul = LinearMX | GroupedLinearMX

#: smallest scale byte (E8M0) for which bfloat16 represents all values of every 8-bit element: 2**-133 for the 2**-16 of
#: E5M2
_LEAST_SCALE = 127 - 133 + 16


@graph_pass(LinearMX, QUANTIZED)
def use_bf16_matmul(model: GraphModule) -> None:
    """Pass the quantized x of a float32 `linear_mx` on the CPU in bfloat16, and keep the result in float32.

    bfloat16 represents the values of x and of the weight exactly, except E4M3 and E5M2 values below 2**-133: it has 8
    bits of precision and the exponents of float32. Sums stay in float32.

    A quantization along the last dimension that only such matmuls use becomes one kernel that writes bfloat16; other
    values are cast. The pass skips a rotated x, an x of few rows, and weights that the bfloat16 kernels do not decode.
    Gradients of x pass through bfloat16.

    Where this machine multiplies the codes of both operands as integers, the pass also replaces matmuls of fewer rows,
    and bfloat16 matmuls. If it has only integers, small float32 matmuls stay, for which integers are slower. With
    AVX512_BF16 it also replaces bfloat16 matmuls, because that kernel decodes the weight as it multiplies. With AMX it
    does not, because AMX kernels are no faster than torch there.
    """
    matmuls_of: dict[Node, list[Node]] = defaultdict(list)
    for node, call in LinearMX.calls_in(model.graph):
        if not call.rotation and call.target_dtype is None and is_quantized(call.x) and _is_faster_in_bf16(node, call):
            matmuls_of[call.x].append(node)
    for x, matmuls in matmuls_of.items():
        dtype = dtype_of(x)
        values = _in_bfloat16(model, x, alone=set(x.users) == set(matmuls))
        for matmul in matmuls:
            matmul.args = LinearMX.expect(matmul).replace(x=values, target_dtype=dtype).args
    model.graph.eliminate_dead_code()


def _in_bfloat16(model: GraphModule, x: Node, alone: bool) -> Node:
    """Insert a node with the quantized values in bfloat16, and return it; `alone`: nothing else uses the values."""
    call = _in_one_kernel(x) if alone else None
    if call is None and dtype_of(x) == torch.bfloat16:
        return x
    with model.graph.inserting_after(x):
        if call is None:
            values = model.graph.call_function(aten.to.dtype, (x, torch.bfloat16))
        else:
            values = model.graph.call_function(call.overload, call.args)
    inherit_location(values, x)
    set_value(values)
    return values


def is_quantized(x: Node) -> bool:
    """Return whether bfloat16 represents the values of a node."""
    quantization = _quantization(x)
    return quantization is not None and quantization.spec.has_plain_scale and quantization.spec.has_kernels


def _quantization(x: Node) -> FakeQuantize | RotatedFakeQuantize | Dequantize | None:
    return FakeQuantize.of(x) or RotatedFakeQuantize.of(x) or Dequantize.of(x)


def _in_one_kernel(x: Node) -> RotatedFakeQuantize | None:
    """Return the call that computes a node's values in bfloat16; None if there is none."""
    if (rotated := RotatedFakeQuantize.of(x)) is not None:
        return rotated.replace(target_dtype=torch.bfloat16)
    quantization = FakeQuantize.of(x)
    return None if quantization is None else quantization_to_bfloat16(quantization, len(shape_of(x) or ()))


def quantization_to_bfloat16(quantization: FakeQuantize, dimensions: int) -> RotatedFakeQuantize | None:
    """Return the call of `rotated_fake_quantize_mx` that computes what a `fake_quantize_mx` computes, in bfloat16; None
    if there is none. `dimensions`: the number of dimensions of the tensor."""
    if quantization.spec.axis not in (-1, dimensions - 1):
        return None
    if quantization.ste != "identity" or ROUNDINGS[quantization.spec.rounding].random:
        return None
    return RotatedFakeQuantize(quantization.x, 1, quantization.spec, torch.bfloat16)


def _is_faster_in_bf16(node: Node, call: LinearMX) -> bool:
    """Return whether matrix instructions support a matmul, and are faster than the kernel for its dtype."""
    *rows, k = shape_of(call.x) or (None,)
    if not isinstance(k, int) or not call.spec.has_plain_scale:
        return False
    quantization = _quantization(call.x)
    x = quantization.spec if quantization else None
    known = [n for n in rows if isinstance(n, int)]
    count = math.prod(known) if len(known) == len(rows) else None
    return supports("multiply quantized x in bfloat16", value_of(node), x, call.spec, count, k)


@graph_pass((LinearMX, GroupedLinearMX), QUANTIZED)
def use_bfloat16_tensor_cores(model: GraphModule) -> None:
    """Pass the quantized x of a float32 `linear_mx` or `grouped_linear_mx` on a GPU in bfloat16, and keep the result in
    float32.

    Tensor cores multiply bfloat16 ten times as fast as float32, and sum in float32.

    bfloat16 represents the values of x and of the weight, except values of x below 2**-133. The pass skips weights with
    values below 2**-133, and weights that are not constant.
    """
    constants = constant_nodes(model.graph)
    values: dict[Node, Node] = {}
    matmuls: list[tuple[Node, _Matmul]] = [
        *LinearMX.calls_in(model.graph),
        *GroupedLinearMX.calls_in(model.graph),
    ]
    for node, call in matmuls:
        if call.target_dtype is not None or not is_quantized(call.x) or not _runs_on_tensor_cores(node, call):
            continue
        if isinstance(call, LinearMX) and call.rotation:
            continue
        if any(n not in constants or n.op != "get_attr" for n in (call.codes, call.scale)):
            continue
        if not _is_exact_in_bf16(call, tensor_of(model, call.codes), tensor_of(model, call.scale)):
            continue
        if call.x not in values:
            with model.graph.inserting_after(call.x):
                values[call.x] = model.graph.call_function(aten.to.dtype, (call.x, torch.bfloat16))
            inherit_location(values[call.x], call.x)
            set_value(values[call.x])
        node.args = call.replace(x=values[call.x], target_dtype=torch.float32).args


def _is_exact_in_bf16(call: _Matmul, codes: Tensor, scale: Tensor) -> bool:
    """Return whether bfloat16 represents every value of a weight."""
    small = (scale < _LEAST_SCALE).any(-1)
    length = value_of(call.x).shape[-1]
    values = call.dequantization(torch.float32, length).replace(codes=codes[small], scale=scale[small]).call()
    return torch.equal(values, values.to(torch.bfloat16).to(torch.float32))


def _runs_on_tensor_cores(node: Node, call: _Matmul) -> bool:
    value = value_of(node)
    if value is None or value.dtype != torch.float32 or not call.spec.has_kernels or not call.spec.has_plain_scale:
        return False
    return supports("multiply x and weights rounded to bfloat16", value)
