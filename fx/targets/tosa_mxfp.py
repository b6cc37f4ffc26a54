"""ExecuTorch's `tosa_mxfp::linear` and `tosa_mxfp::conv2d`, which its Arm backend lowers to TOSA's block-scaled
operators.

Each quantizes its input itself, in the format of its weight, and takes whole blocks. TOSA's convolutions have strides
without a remainder. FP4 codes are pairs in a byte, FP6 codes are bytes. No operator quantizes alone: a product with the
identity matrix does.
Source: executorch 1.5.1, executorch/backends/arm/ao_ext; for the scale modes the results of TOSA's reference model
(tosa-tools 2026.8.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.formats import ElementFormat
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.node import (
    args_of,
    dtype_of,
    insert_before,
    make_positional,
    name_of,
    node_arg,
    register_buffer,
    tensor_of,
    value_of,
)
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import remove_unused, replace_node
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.fx.targets.aten import CODE_DTYPES
from pt2mx.fx.targets.operators import operator_of
from pt2mx.fx.targets.pairs import Pair, quantized_input
from pt2mx.kernels.elements import decode, encode
from pt2mx.kernels.packing import pack, pad_axis, unpack
from pt2mx.spec import MXSpec

aten = torch.ops.aten
_HOME = "executorch.backends.arm.ao_ext"
_WEIGHT = "Tensor input, Tensor weight_qdata, Tensor weight_scale, Tensor? bias=None"
_BLOCKS = "SymInt block_size=32, str weight_payload_dtype=''"
_SIZES = "int[] stride, int[] padding, int[] dilation, SymInt groups=1"
_BLOCK = 32
#: the E8M0 code of the scale 1
_ONE = 127
#: element -> its name in the operators, which `TARGETS` lists
NAMES = {
    "fp8_e4m3": "f8e4m3",
    "fp8_e5m2": "f8e5m2",
    "fp6_e2m3": "fp6e2m3",
    "fp6_e3m2": "fp6e3m2",
    "fp4_e2m1": "f4e2m1",
}
_ELEMENTS = {text: name for name, text in NAMES.items()}
#: dtypes of results, which ExecuTorch casts from float32
_RESULTS = (torch.float32, torch.bfloat16)
#: element -> the scale mode by which TOSA quantizes
SCALE_MODES = {name: "rceil" if name in CODE_DTYPES else "even" for name in NAMES}


def to_tosa_mxfp(model: GraphModule, pairs: Sequence[Pair], names: Mapping[str, str]) -> GraphModule:
    """Replace linear layers and convolutions of two quantized tensors by `tosa_mxfp`'s operators.

    Other operators compute in float: their weights are constants, their activations are quantized by products of the
    blocks with the identity matrix.

    Raises:
        MXError: for an activation of another scale mode, or in blocks along a dynamic size; for a layer in float16, and
            one whose input and weight differ.
    """
    for pair in pairs:
        _check(pair)
    by_node = {pair.node: pair for pair in pairs}
    weights: dict[tuple[str, ...], list[Node]] = {}
    for node in [node for node in model.graph.nodes if node.target in _OPERATORS]:
        operator = _OPERATORS[node.target]
        make_positional(node, operator.arguments)
        x, w = (by_node.get(argument) for argument in args_of(node)[:2])
        if w is not None and _has_operator(node, w):
            stored = tuple(name_of(node_arg(w.node, i)) for i in range(2))
            input = _check_input(node, operator, x, w)
            if stored not in weights:
                weights[stored] = _weight(model, node, w)
            _multiply(node, operator, input, w, weights[stored], names[w.spec.element.name])
    identities: dict[ElementFormat, list[Node]] = {}
    for pair in [pair for pair in pairs if pair.node.users]:
        element = pair.spec.element
        if pair.is_weight:
            fold_constant(model, pair.node, pair.name)
            continue
        if element not in identities:
            device = value_of(pair.node).device
            codes = encode(torch.eye(_BLOCK, device=device), element)
            scale = torch.full((_BLOCK, 1), _ONE, dtype=torch.uint8, device=device)
            identities[element] = _constants(model, pair.node, f"identity_{element.name}", element, codes, scale)
        _quantize(pair, identities[element], names[element.name])
    return remove_unused(model)


def _check(pair: Pair) -> None:
    """Raise an MXError for a tensor that TOSA does not quantize."""
    mode, size = SCALE_MODES[pair.spec.element.name], pair.shape[pair.spec.axis]
    if not pair.is_weight and pair.spec.scale_mode != mode:
        raise MXError(
            f"{pair.name} is in {pair.spec}, and TOSA quantizes {pair.spec.element} by scale_mode {mode}: give it "
            "this one, or leave the module in float"
        )
    if isinstance(size, str):
        raise MXError(
            f"{pair.name} is in {pair.spec} along the dynamic size {size}, which tosa_mxfp cannot fill up to whole "
            "blocks: export it with a fixed size, or leave the module in float"
        )


def _has_operator(node: Node, weight: Pair) -> bool:
    """Return whether `tosa_mxfp` has an operator for a layer with that weight, apart from the formats."""
    is_batched = value_of(node.args[0]).dim() >= len(weight.shape)
    return weight.is_weight and is_batched and args_of(node)[6:] in ((), (1,))


def _check_input(node: Node, operator: _Operator, x: Pair | None, weight: Pair) -> Pair:
    """Return the input of a layer, which must be quantized as the weight is."""
    if x is None or not operator.takes(x, weight):
        raise MXError(
            f"{weight.name} is in {weight.spec}, and the input of {module_name(node) or node.name!r} is in "
            f"{x.spec if x else 'float'}: tosa_mxfp multiplies an activation and a weight of one element in blocks "
            "along the input channels; quantize both so, or leave the module in float"
        )
    if (dtype := dtype_of(node)) not in _RESULTS:
        raise MXError(
            f"{module_name(node) or node.name!r} computes in {dtype}, and tosa_mxfp in float32 and bfloat16: convert "
            "the model before its export, or leave the module in float"
        )
    return x


def _multiply(node: Node, operator: _Operator, x: Pair, weight: Pair, constants: list[Node], name: str) -> None:
    """Replace a layer by its operator."""
    _, _, bias, *sizes = args_of(node)
    source = _padded(node, quantized_input(x), {x.spec.axis: (0, -int(weight.shape[weight.spec.axis]) % _BLOCK)})
    source, geometry = _without_remainder(node, source, weight.shape[2:], sizes)
    bias = bias and _cast(node, bias, dtype_of(node), torch.float32)
    _replace(node, _call(node, operator, source, *constants, bias, *geometry, _BLOCK, name))


def _cast(place: Node, x: Node, given: torch.dtype | None, dtype: torch.dtype | None) -> Node:
    """Return a node of one dtype as a node of another."""
    return x if given == dtype else insert_before(place, aten.to.dtype, x, dtype)


def _call(place: Node, operator: _Operator, *args: Any) -> Node:
    """Insert a call of an operator of `tosa_mxfp` before a node."""
    overload = operator_of(f"tosa_mxfp::{operator.name}", operator.schema, _HOME, operator.function)
    return insert_before(place, overload, *args)


def _replace(node: Node, new: Node) -> None:
    """Replace a node by one in float32."""
    replace_node(node, _cast(node, new, torch.float32, dtype_of(node)))


def _quantize(pair: Pair, identity: list[Node], name: str) -> None:
    """Quantize a tensor that another operator reads, by a product of its blocks with the identity matrix."""
    node, axis, size = pair.node, pair.spec.axis, int(pair.shape[pair.spec.axis])
    x = insert_before(node, aten.movedim.int, quantized_input(pair), axis, -1)
    x = _padded(node, x, {len(pair.shape) - 1: (0, -size % _BLOCK)})
    x = insert_before(node, aten.unflatten.int, x, -1, [-1, _BLOCK])
    x = _call(node, _OPERATORS[aten.linear.default], x, *identity, None, _BLOCK, name)
    x = insert_before(node, aten.flatten.using_ints, x, -2)
    x = insert_before(node, aten.slice.Tensor, x, -1, 0, size)
    _replace(node, insert_before(node, aten.movedim.int, x, -1, axis))


def _padded(place: Node, x: Node, pads: Mapping[int, tuple[int, int]]) -> Node:
    """Insert zeros before and after the values along dimensions, if there are any."""
    flat = [size for dim in reversed(range(value_of(x).dim())) for size in pads.get(dim, (0, 0))]
    return insert_before(place, aten.constant_pad_nd.default, x, flat) if any(flat) else x


def _without_remainder(
    place: Node, x: Node, kernel: Sequence[Any], geometry: Sequence[Any]
) -> tuple[Node, Sequence[Any]]:
    """Pad the input of a convolution explicitly, or slice it, if its stride leaves rows that no window reads."""
    pads = {}
    for dim, k, stride, pad, dilation in zip(range(2, 2 + len(kernel)), kernel, *geometry[:3], strict=True):
        size = value_of(x).shape[dim]
        rest = (size + 2 * pad - dilation * (k - 1) - 1) % stride if isinstance(size, int) else 0
        if rest > pad:
            x = insert_before(place, aten.slice.Tensor, x, dim, 0, size - (rest - pad))
        pads[dim] = pad, max(pad - rest, 0)
    if all(before == after for before, after in pads.values()):
        return x, geometry
    return _padded(place, x, pads), [geometry[0], [0, 0], *geometry[2:]]


def _weight(model: GraphModule, place: Node, pair: Pair) -> list[Node]:
    """Register codes and scales as the operators take them, (1, N, K) or (O, H, W, I), and return their nodes."""
    codes, scale = (tensor_of(model, node_arg(pair.node, i)).detach() for i in range(2))
    codes = pad_axis(unpack(codes, pair.spec.axis, pair.spec.element.bits), pair.spec.axis, _BLOCK)
    return _constants(model, place, pair.name, pair.spec.element, codes.movedim(1, -1), scale.movedim(1, -1))


def _constants(
    model: GraphModule, place: Node, name: str, element: ElementFormat, codes: Tensor, scale: Tensor
) -> list[Node]:
    """Register codes and E8M0 scales whose blocks are along the last dimension, and return their nodes."""
    codes = codes.to(torch.uint8)
    if element.bits == 4:
        codes = pack(codes.to(torch.int32), codes.dim() - 1, 4)
    values = {
        f"{name}_qdata": codes.contiguous().view(CODE_DTYPES.get(element.name, torch.uint8)),
        f"{name}_e8m0": scale.contiguous().view(torch.float8_e8m0fnu),
    }
    with model.graph.inserting_before(place):
        return [
            model.graph.get_attr(register_buffer(model, name, value.unsqueeze(0) if value.dim() == 2 else value))
            for name, value in values.items()
        ]


def _operands(x: Tensor, qdata: Tensor, scale: Tensor, axis: int, block_size: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the quantized input, and the weight with the channels last, in float32."""
    spec = MXSpec(_ELEMENTS[name], block_size, axis, scale_mode=SCALE_MODES[_ELEMENTS[name]])
    codes = qdata.view(torch.uint8)
    codes = unpack(codes, codes.dim() - 1, 4) if spec.element.bits == 4 else codes.to(torch.int32)
    blocks = decode(codes, spec.element).unflatten(-1, (-1, block_size))
    return fake_quantize_mx(x.float(), spec), (blocks * scale.float().unsqueeze(-1)).flatten(-2)


def _linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, block_size: int, name: str) -> Tensor:
    x, weight = _operands(x, qdata, scale, -1, block_size, name)
    return functional.linear(x, weight.squeeze(0), bias)


def _conv2d(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    *geometry, block_size, name = others
    x, weight = _operands(x, qdata, scale, 1, block_size, name)
    return functional.conv2d(x, weight.permute(0, 3, 1, 2).contiguous(), bias, *geometry)


@dataclass(frozen=True)
class _Operator:
    """An operator: its definition, the arguments of aten's that it takes, and the axis of blocks of x and weight."""

    name: str
    schema: str
    function: Callable[..., Tensor]
    arguments: int
    axes: tuple[int, int]

    def takes(self, x: Pair, weight: Pair) -> bool:
        """Return whether an activation and a weight have one element, in blocks along the channels."""
        axes = tuple(axis % len(pair.shape) for axis, pair in zip(self.axes, (x, weight), strict=True))
        alike = x.spec.element == weight.spec.element and weight.is_weight and not x.is_weight
        return alike and (x.spec.axis, weight.spec.axis) == axes


_OPERATORS = {
    aten.linear.default: _Operator("linear", f"({_WEIGHT}, {_BLOCKS}) -> Tensor", _linear, 3, (-1, -1)),
    aten.conv2d.default: _Operator("conv2d", f"({_WEIGHT}, {_SIZES}, {_BLOCKS}) -> Tensor", _conv2d, 7, (1, 1)),
}
