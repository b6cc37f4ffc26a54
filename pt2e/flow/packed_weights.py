"""Yield the packed weights of a program, for other hardware and other files; count their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.analysis.measure import MXStorage
from pt2mx.errors import MXError
from pt2mx.functional import dequantize_mx
from pt2mx.fx.graph.higher_order_ops import captured_operands, nodes_in_order, written_in
from pt2mx.fx.graph.node import Dequantize, model_of, name_of, named_args, parameter_of, shape_of, tensor_of
from pt2mx.fx.graph.qdq import holds_observers, is_portable, spec_of_dequantize
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.kernels.packing import group_of, packed_length, unpacked_length
from pt2mx.ops import convolution, fp8_rowwise, linear, quantize_epilogue, scaled_mm
from pt2mx.spec import MXSpec

aten = torch.ops.aten
#: matmuls and convolutions of lowered models, whose weight has its blocks along the last dimension
_MATMULS: dict[object, Any] = {
    operator.overload: operator
    for operator in (
        linear.LinearMX,
        linear.GroupedLinearMX,
        quantize_epilogue.LinearFakeQuantize,
        convolution.Conv2dMX,
        quantize_epilogue.Conv2dFakeQuantize,
    )
}
#: matmuls whose weight is in the layout of a GPU's tensor cores
_REORDERED = (linear.linear_mx_mma_layout, scaled_mm.scaled_mm_mx, fp8_rowwise.mm_fp8_rows)
#: all operators that multiply with packed weights
PACKED_MATMULS = (*_MATMULS, *_REORDERED)
#: operators that select rows of codes, or pass all of them on
_ROWS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.alias.default, aten.detach.default)
#: a note is given if scales and padding add this share to the bits of a value
_NOTED = 0.25


class PackedWeight(NamedTuple):
    """A packed weight of a program.

    Args:
        name: the name of the quantized parameter, or of the first one from which its values were computed:
            transformers' mixtures of experts transpose theirs first.
        spec: the element, the block size and the axis, counted from the front. If the weight was quantized before the
            program was exported, its scale mode and rounding are unknown, and have their defaults here.
        codes: (..., bytes of n, ...) uint8, packed along the axis.
        scales: (..., ceil(n / block_size), ...) uint8, E8M0; of other scale formats as `pt2mx.quantize_mx` gives them.
        shape: (..., n, ...), the shape of the values.
        tensor_scale: () float32, of formats with a scale of the whole tensor.
    """

    name: str
    spec: MXSpec
    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    tensor_scale: Tensor | None = None

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values.

        Args:
            dtype: float32, float16 or bfloat16.

        Returns:
            A tensor of `shape`.

        Raises:
            MXError: for another dtype.

        Example:
            >>> import torch, pt2mx
            >>> scales, codes = pt2mx.quantize_mx(torch.ones(2, 33), "mxfp4")
            >>> weight = pt2mx.PackedWeight("weight", pt2mx.MXSpec("mxfp4"), codes, scales, (2, 33))
            >>> weight.dequantized().shape
            torch.Size([2, 33])
        """
        length = self.shape[self.spec.axis]
        packed = self.codes, self.scales, self.spec
        return dequantize_mx(*packed, target_dtype=dtype, length=length, tensor_scale=self.tensor_scale)


def packed_weights(program: GraphModule | ExportedProgram) -> Iterator[PackedWeight]:
    """Yield the quantized weights of a program, each once, in the order in which the program uses them.

    A lowered model may store weights in another form: with the last two dimensions swapped, so that blocks run along
    the last one (the name ends in `_t`), or several concatenated (`_joined` follows the name of the first).

    Args:
        program: a result of `convert_pt2e`, `lower_to_inductor` or `load_program`, or an export of one. It does not
            change, and the yielded tensors share its memory.

    Returns:
        An iterator over `PackedWeight`: name, spec, codes, scales, shape, tensor_scale.

    Raises:
        MXError: for another object, a prepared model, a portable program (its operators are decomposed), and a program
            that was lowered to the layout of a GPU's tensor cores.

    Example:
        >>> import torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> for weight in pt2mx.packed_weights(pt2mx.convert_pt2e(prepared)):
        ...     print(weight.name, weight.spec, weight.codes.shape, weight.scales.shape, weight.shape)
        0.weight mxfp4_e2m1{32}(even,even) torch.Size([32, 32]) torch.Size([32, 2]) (32, 64)
    """
    return _weights(fold_all_weights(copy_sharing_tensors(converted_graph(program))))


def converted_graph(program: object) -> GraphModule:
    """Return the graph of a converted or lowered program.

    Raises:
        MXError: as `packed_weights`.
    """
    if isinstance(program, ExportedProgram):
        program = program.module(check_guards=False)
    if not isinstance(program, GraphModule):
        raise MXError(f"expected a converted graph module or an ExportedProgram, not {type(program).__name__}")
    if is_portable(program):
        raise MXError("a portable program holds no packed weights by name: give the one that it was made of")
    if holds_observers(program.state_dict()):
        raise MXError("a prepared model has no packed weights yet: pass what convert_pt2e returned")
    return program


def _weights(model: GraphModule) -> Iterator[PackedWeight]:
    """Yield each weight of a folded model at its first user."""
    yielded: set[tuple[object, ...]] = set()
    captured = captured_operands(model)
    for codes, scales, read in stored_weights(model):
        weight = _weight(codes, scales, read, captured)
        memory = (weight.codes.data_ptr(), weight.codes.shape, weight.codes.stride())
        if memory not in yielded:
            yielded.add(memory)
            yield weight


def stored_weights(model: GraphModule) -> Iterator[tuple[Node, Node, _Read]]:
    """Yield (codes, scales, read) at each operator that reads a weight which the model stores and never writes. Codes
    and scales are `get_attr` nodes."""
    outside, written = captured_operands(model), written_in(model)
    for node in nodes_in_order(model):
        read = _read(node)
        if read is None:
            continue
        codes, scales = _stored(read.codes, outside), _stored(read.scales, outside)
        if codes is not None and scales is not None and written.isdisjoint((codes, scales)):
            yield codes, scales, read


class _Read(NamedTuple):
    """The codes and scales that a node reads. `axis` counts from the end; `length` is None if the bytes give it."""

    codes: Node
    scales: Node
    spec: MXSpec
    axis: int
    length: int | None
    tensor_scale: Node | None


def _read(node: Node) -> _Read | None:
    """Return the codes and scales that an operator reads, of a weight or another tensor; None for other nodes."""
    if node.target in _REORDERED:
        raise MXError(f"{node} has a weight in the layout of a GPU's tensor cores: pass the model before it is lowered")
    if node.target is ops.dequantize_mx:
        call, rank = Dequantize.expect(node), len(shape_of(node) or ())
        length = call.length if isinstance(call.length, int) else None
        axis = call.spec.axis % rank - rank
        return _Read(call.codes, call.scale, spec_of_dequantize(node), axis, length, call.tensor_scale)
    if node.target in _MATMULS:
        matmul = _MATMULS[node.target].from_args(*named_args(node).values())
        k = (shape_of(matmul.x) or ())[-1]
        length = k if isinstance(k, int) else None
        return _Read(matmul.codes, matmul.scale, matmul.spec, -1, length, getattr(matmul, "tensor_scale", None))
    return None


def _stored(node: Node, outside: Mapping[Node, Sequence[object]]) -> Node | None:
    """Return the `get_attr` node of the buffer behind an operand; None for a computed operand and an input."""
    while node.op != "get_attr":
        operands = outside.get(node, []) if node.op == "placeholder" else node.args[:1] if node.target in _ROWS else []
        source = operands[0] if len(set(operands)) == 1 else None
        if not isinstance(source, Node):
            return None
        node = source
    return node


def _weight(codes: Node, scales: Node, read: _Read, outside: Mapping[Node, Sequence[object]]) -> PackedWeight:
    data, bytes_of_scales = (tensor_of(model_of(node.graph), node) for node in (codes, scales))
    axis = read.axis + data.dim()
    length = unpacked_length(data.shape[axis], read.spec.element.bits) if read.length is None else read.length
    shape = (*data.shape[:axis], length, *data.shape[axis + 1 :])
    spec, t = read.spec.replace(axis=axis), None if read.tensor_scale is None else _stored(read.tensor_scale, outside)
    tensor_scale = None if t is None else tensor_of(model_of(t.graph), t)
    return PackedWeight(parameter_of(name_of(codes)), spec, data, bytes_of_scales, shape, tensor_scale)


def packed_bytes(shape: Sequence[int], spec: MXSpec) -> int:
    """Return the bytes of the codes and scales of a tensor of this shape."""
    length = shape[spec.axis]
    rows = math.prod(shape) // length if length else 0
    scales = MXStorage.of(shape, spec).num_blocks * spec.scale_bits // 8 + 4 * spec.has_tensor_scale
    return rows * packed_length(length, spec.element.bits) + scales


def storage_note(shape: Sequence[int], spec: MXSpec) -> str | None:
    """Explain why a packed tensor takes more bits than its format has; None if it does not."""
    values = math.prod(shape)
    if not values:
        return None
    codes, size = group_of(spec.element.bits)
    width, length = 8 * size // codes, shape[spec.axis]
    bits = 8 * packed_bytes(shape, spec) / values
    reasons = [f"codes of {spec.element.bits} bits take {width}"] if width != spec.element.bits else []
    if bits >= (1 + _NOTED) * (width + spec.effective_bits - spec.element.bits):
        count = f"{length} value{'s' * (length > 1)}"
        reasons.append(f"blocks of only {count}, each with a scale and whole bytes of its own")
    return f"{bits:.4g} bits a value: {', '.join(reasons)}" if reasons else None
