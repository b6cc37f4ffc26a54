"""Weights in torch's own dtypes, and torch's scaled matmuls: the passes of `lower_to_aten`.

They put functions of tensors in the place of pt2mx's operators. The export that follows traces these into aten
operators.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import ScalingType, SwizzleType

from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    Dequantize,
    FakeQuantize,
    Quantize,
    dtype_of,
    name_of,
    node_arg,
    register_buffer,
    shape_of,
    tensor_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.packed_operands import GATHERS, argument, weights_of_matmuls
from pt2mx.kernels import arithmetic, elements, float_scales, reference
from pt2mx.kernels.packing import pack, split_axis, trim_axis, unpack
from pt2mx.kernels.scaled_mm import FORMS, swizzle
from pt2mx.modes import ROUNDINGS
from pt2mx.ops import quantization
from pt2mx.ops.checks import from_front
from pt2mx.ops.memory_format import contiguous_order, inverse_permute, order_in_memory
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: element -> the dtype of its codes, one a value. FP6 has none; torch.export does not save torch's pairs of FP4
CODE_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int8_full": torch.int8,
}
#: scale format -> the dtype of its scales
SCALE_DTYPES = {
    "e8m0": torch.float8_e8m0fnu,
    **dict.fromkeys(("e4m3", "e4m3_f32", "e4m3_f32_divisor"), torch.float8_e4m3fn),
    **{name: scale.dtype for name, scale in SCALE_FORMATS.items() if scale.dtype.is_floating_point},
}


class _Read(NamedTuple):
    """A dequantization of constants: the buffers of codes and scales, and the nodes that read them, which are gathers
    of rows or the dequantization itself."""

    buffers: tuple[Node, Node]
    readers: tuple[Node, ...]


@graph_pass(Dequantize)
def use_native_dtypes(model: GraphModule) -> None:
    """Store codes and scales of weights in torch's dtypes, and dequantize them by functions of tensors.

    Codes stay bytes where something else reads them, in subgraphs, whose weights are operands, and for blocks of
    several rows.
    """
    users: dict[str, set[Node]] = defaultdict(set)
    for node in model.graph.find_nodes(op="get_attr"):
        users[name_of(node)].update(node.users)
    calls = dict(Dequantize.calls_in(model.graph))
    reads = {node: read for node, call in calls.items() if (read := _read(model, node, call))}
    while refused := _read_by_others(reads, users):
        for node in refused:
            del reads[node]
    for node, read in reads.items():
        node.target, spec, (codes, scale) = dequantize_native, calls[node].spec, read.buffers
        _view(model, scale, SCALE_DTYPES[spec.scale_format.name])
        if spec.element.name in CODE_DTYPES:
            _view(model, codes, CODE_DTYPES[spec.element.name])


def _view(model: GraphModule, buffer: Node, dtype: torch.dtype) -> None:
    """Make the buffer that a node reads one of that dtype, with the same bytes."""
    path, _, attribute = name_of(buffer).rpartition(".")
    setattr(model.get_submodule(path), attribute, tensor_of(model, buffer).view(dtype))


def _read(model: GraphModule, node: Node, call: Dequantize) -> _Read | None:
    """Return how a dequantization reads constants in dtypes that torch has; None for another one."""
    if call.spec.block_rows > 1 or not call.spec.has_operators or call.spec.scale_format.name not in SCALE_DTYPES:
        return None
    gathers = [n for n in (call.codes, call.scale) if n.target in GATHERS and set(n.users) == {node}]
    codes, scale = (node_arg(n) if n in gathers else n for n in (call.codes, call.scale))
    if {codes.op, scale.op} != {"get_attr"} or (call.tensor_scale and not tensor_of(model, codes).is_contiguous()):
        return None
    return _Read((codes, scale), (*gathers, node))


def _read_by_others(reads: dict[Node, _Read], users: dict[str, set[Node]]) -> list[Node]:
    """Return the dequantizations of buffers that other nodes read too."""
    readers = {reader for read in reads.values() for reader in read.readers}
    return [node for node, read in reads.items() if any(users[name_of(b)] - readers for b in read.buffers)]


def dequantize_native(*args: Any) -> Tensor:
    """Return what `dequantize_mx` gives for codes and scales in torch's dtypes; codes of less than 8 bits are bytes."""
    call: quantization.Dequantize[Tensor] = quantization.Dequantize.from_args(*args)
    spec, order = from_front(call.spec, call.codes), order_in_memory(call.codes)
    if order == contiguous_order(call.codes):
        return _values(call, spec)
    codes, scale = (tensor.permute(order) for tensor in (call.codes, call.scale))
    spec = spec.replace(axis=order.index(spec.axis))
    return inverse_permute(_values(call.replace(codes=codes, scale=scale), spec), order)


def _values(call: quantization.Dequantize[Tensor], spec: MXSpec) -> Tensor:
    """Return the values of contiguous codes, with blocks along `spec.axis`."""
    element = spec.element
    if call.codes.dtype == torch.uint8:
        codes = unpack(call.codes, spec.axis, element.bits)
        codes = codes if call.length is None else trim_axis(codes, spec.axis, call.length)
        values = arithmetic.decode(codes, element)
    else:
        values = call.codes.to(torch.float32)
        values = values * 2.0 ** (element.emin - element.mantissa_bits) if element.is_int else values
    blocks = reference.to_blocks(values, spec)
    scale = split_axis(call.scale.to(torch.float32), spec.axis, 1)
    if spec.has_power_of_two_scale:
        blocks = blocks * scale
    else:
        t = float_scales.tensor_scale_of(call.tensor_scale, spec, blocks)
        blocks = float_scales.times(blocks, scale, t, spec, arithmetic)
    return reference.from_blocks(blocks.to(call.dtype), spec, values.shape, elements).contiguous()


@dataclass(frozen=True)
class _Recipe:
    """How torch's scaled matmuls take a scale format: the size of its blocks, and the type of each scale."""

    block_size: int
    scales: tuple[ScalingType, ...]


_RECIPES = {
    "e8m0": _Recipe(32, (ScalingType.BlockWise1x32,)),
    "e4m3": _Recipe(16, (ScalingType.BlockWise1x16,)),
    "e4m3_f32": _Recipe(16, (ScalingType.BlockWise1x16, ScalingType.TensorWise)),
}
_PAIRS_OF_FP4 = torch.float4_e2m1fn_x2


@graph_pass(Dequantize, FakeQuantize)
def use_scaled_mm(model: GraphModule) -> None:
    """Multiply a quantized activation and a weight, both blocked along K in formats that torch multiplies, by a scaled
    matmul. The weight's scales are swizzled now, the activation's at each call. Other matmuls stay."""
    activations: dict[Node, list[Node]] = {}
    weights: dict[Node, list[Node]] = {}
    for node, matmul, weight in weights_of_matmuls(model):
        x, dequantize = node_arg(node, matmul.x), weight.dequantize
        quantization, packed = FakeQuantize.of(x), Dequantize.expect(dequantize)
        is_matrix = weight.dims == matmul.dims and len(weight.dims) == 2 and weight.axis == 1
        if quantization is None or not is_matrix or not _is_scaled(quantization, packed):
            continue
        if x not in activations:
            activations[x] = _quantized(x, quantization)
        if dequantize not in weights:
            weights[dequantize] = _native_weight(model, dequantize, packed)
        bias, t = argument(node, matmul.third), (quantization.tensor_scale, packed.tensor_scale)
        args = (quantization.x, *activations[x], t[0], *weights[dequantize], t[1], bias, packed.spec.scale_format.name)
        with model.graph.inserting_before(node):
            scaled = model.graph.call_function(scaled_matmul, (*args, dtype_of(node)))
        replace_node(node, scaled)


def _is_scaled(x: FakeQuantize, weight: Dequantize) -> bool:
    """Return whether torch has a scaled matmul for the formats and sizes of an activation and a weight."""
    recipe, shape, codes = _RECIPES.get(x.spec.scale_format.name), shape_of(x.x), shape_of(weight.codes)
    if recipe is None or shape is None or codes is None or {weight.codes.op, weight.scale.op} != {"get_attr"}:
        return False
    form = FORMS.get((x.spec.element.name, weight.spec.element.name))
    if form is None or (recipe.block_size < 32 and form.x != _PAIRS_OF_FP4):
        return False
    sizes = (shape[-1], 32), (codes[0], 16)
    if not all(isinstance(size, int) and size > 0 and size % step == 0 for size, step in sizes):
        return False
    blocks = {(s.scale_format, s.block_size, s.block_rows) for s in (x.spec, weight.spec)}
    if blocks != {(x.spec.scale_format, recipe.block_size, 1)} or x.spec.axis not in (-1, len(shape) - 1):
        return False
    return not ROUNDINGS[x.spec.rounding].random


def _quantized(x: Node, call: FakeQuantize) -> list[Node]:
    """Insert the quantization of an activation, and return the nodes of its codes and its scales."""
    args = Quantize(call.x, call.spec, None, call.tensor_scale).args
    with x.graph.inserting_before(x):
        both = x.graph.call_function(quantize_native, args)
        return [x.graph.call_function(operator.getitem, (both, i)) for i in range(2)]


def _native_weight(model: GraphModule, dequantize: Node, call: Dequantize) -> list[Node]:
    """Register the codes and the swizzled scales of a weight in torch's dtypes, and return the nodes that read them."""
    codes, scale = tensor_of(model, call.codes), _swizzled(tensor_of(model, call.scale))
    named = {
        name_of(call.codes): codes.contiguous().view(CODE_DTYPES.get(call.spec.element.name, _PAIRS_OF_FP4)),
        f"{name_of(call.scale)}_swizzled": scale.view(SCALE_DTYPES[call.spec.scale_format.name]),
    }
    with model.graph.inserting_before(dequantize):
        return [model.graph.get_attr(register_buffer(model, name, value)) for name, value in named.items()]


def _swizzled(scale: Tensor) -> Tensor:
    """scale: (R, C) -> the same in the order of `swizzle`, (R rounded up to 128s, C rounded up to 4s)."""
    return swizzle(scale).view(-1, -(-scale.shape[1] // 4) * 4)


def quantize_native(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the codes of `quantize_mx` in torch's dtype, (rows, K) or pairs (rows, K / 2), and the swizzled scales."""
    call: quantization.Quantize[Tensor] = quantization.Quantize.from_args(*args)
    x, spec = call.x.reshape(-1, call.x.shape[-1]), call.spec.replace(axis=1)
    values, scale = arithmetic.quantize(x, spec, arithmetic, call.tensor_scale)
    dtype = CODE_DTYPES.get(spec.element.name)
    if dtype is None:
        codes = pack(elements.encode(values, spec.element), 1, spec.element.bits).view(_PAIRS_OF_FP4)
    else:
        codes = values.to(dtype)
    return codes, _swizzled(scale).to(SCALE_DTYPES[spec.scale_format.name])


def scaled_matmul(
    like: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_tensor_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    weight_tensor_scale: Tensor | None,
    bias: Tensor | None,
    scale_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """like: (..., K), x: codes (rows, K) or pairs (rows, K / 2), weight: (N, K) or (N, K / 2) -> (..., N) `dtype`."""
    recipe = [kind.value for kind in _RECIPES[scale_format].scales]
    if len(recipe) == 1:
        y = aten._scaled_mm.default(x, weight.t(), x_scale, weight_scale, None, None, dtype)
    else:
        swizzles = [SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value]
        scales = [x_scale, x_tensor_scale], [weight_scale, weight_tensor_scale]
        described = scales[0], recipe, swizzles, scales[1], recipe, swizzles
        y = aten._scaled_mm_v2.default(x, weight.t(), *described, None, dtype)
    y = y.view(*like.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias
