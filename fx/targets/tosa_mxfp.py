"""ExecuTorch's `tosa_mxfp::linear` and `tosa_mxfp::conv2d`, which its Arm backend lowers to TOSA's block-scaled
operators.

Each quantizes its input itself, in the format of its weight. FP4 codes are pairs in a byte, FP6 codes are bytes.
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
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.node import args_of, dtype_of, make_positional, name_of, node_arg, register_buffer, tensor_of
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import erase_unused, remove_unused
from pt2mx.fx.targets.aten import CODE_DTYPES
from pt2mx.fx.targets.operators import operator_of
from pt2mx.fx.targets.pairs import Pair, quantized_input
from pt2mx.kernels.elements import decode
from pt2mx.kernels.packing import pack, unpack
from pt2mx.spec import MXSpec

aten = torch.ops.aten
_HOME = "executorch.backends.arm.ao_ext"
_WEIGHT = "Tensor input, Tensor weight_qdata, Tensor weight_scale, Tensor? bias=None"
_BLOCKS = "SymInt block_size=32, str weight_payload_dtype=''"
_SIZES = "int[] stride, int[] padding, int[] dilation, SymInt groups=1"
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

    Raises:
        MXError: for an activation of another scale mode, a layer in float16, and a quantized tensor that none of these
            operators reads.
    """
    for pair in pairs:
        mode = SCALE_MODES[pair.spec.element.name]
        if not pair.is_weight and pair.spec.scale_mode != mode:
            raise MXError(
                f"{pair.name} is in {pair.spec}, and TOSA quantizes {pair.spec.element} by scale_mode {mode}: give it "
                "this one, or leave the module in float"
            )
    by_node = {pair.node: pair for pair in pairs}
    weights: dict[tuple[str, ...], list[Node]] = {}
    for node in [node for node in model.graph.nodes if node.target in _OPERATORS]:
        operator = _OPERATORS[node.target]
        make_positional(node, operator.arguments)
        input, weight, bias, *others = args_of(node)
        x, w = by_node.get(input), by_node.get(weight)
        if x is None or w is None or not operator.takes(x, w) or others[3:] not in ([], [1]):
            continue
        if (dtype := dtype_of(node)) not in _RESULTS:
            raise MXError(
                f"{module_name(node) or node.name!r} computes in {dtype}, and tosa_mxfp in float32 and bfloat16: "
                "convert the model before its export, or leave the module in float"
            )
        overload = operator_of(f"tosa_mxfp::{operator.name}", operator.schema, _HOME, operator.function)
        stored = tuple(name_of(node_arg(weight, i)) for i in range(2))
        with model.graph.inserting_before(node):
            if stored not in weights:
                weights[stored] = _weight(model, w)
            bias = bias and _cast(bias, dtype, torch.float32)
            args = (quantized_input(x), *weights[stored], bias, *others)
            new = model.graph.call_function(overload, (*args, w.spec.block_size, names[w.spec.element.name]))
            new = _cast(new, torch.float32, dtype)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        erase_unused(node)
    for pair in pairs:
        for user in pair.node.users:
            raise MXError(
                f"{pair.name} is in {pair.spec}, and {user.target} of {module_name(user) or user.name!r} reads it: "
                "tosa_mxfp has linear layers, and 2d convolutions of batches without groups, whose input and weight "
                "have one format, in blocks along the input channels; leave the others in float"
            )
    return remove_unused(model)


def _cast(node: Node, given: torch.dtype | None, dtype: torch.dtype | None) -> Node:
    """Return a node of one dtype as a node of another."""
    return node if given == dtype else node.graph.call_function(aten.to.dtype, (node, dtype))


def _weight(model: GraphModule, pair: Pair) -> list[Node]:
    """Register codes and scales as the operators take them, (1, N, K) or (O, H, W, I), and return their nodes."""
    codes, scale = (tensor_of(model, node_arg(pair.node, i)).detach() for i in range(2))
    bits, axis = pair.spec.element.bits, pair.spec.axis
    codes = unpack(codes, axis, bits).to(torch.uint8)
    order = (0, 2, 3, 1) if codes.dim() == 4 else (0, 1)
    codes, scale = (tensor.permute(order).contiguous() for tensor in (codes, scale))
    if bits == 4:
        codes = pack(codes.to(torch.int32), codes.dim() - 1, bits)
    values = {
        f"{pair.name}_qdata": codes.view(CODE_DTYPES.get(pair.spec.element.name, torch.uint8)),
        f"{pair.name}_e8m0": scale.view(torch.float8_e8m0fnu),
    }
    nodes = []
    for name, value in values.items():
        value = value.unsqueeze(0) if value.dim() == 2 else value
        nodes.append(model.graph.get_attr(register_buffer(model, name, value)))
        nodes[-1].meta["val"] = value
    return nodes


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
