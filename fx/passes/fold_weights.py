"""Compute weights once: fold quantized weights into buffers of codes and scales, or unpack them into float buffers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import (
    computed_from,
    constant_nodes,
    evaluate,
    first_equal,
    hoist_weights,
    mark_constants,
    merge_equal_operands,
    root_name,
)
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.higher_order_ops import call_groups, graph_modules
from pt2mx.fx.graph.node import (
    Dequantize,
    LinearMX,
    args_of,
    dtype_of,
    function_of,
    node_arg,
    operator_of,
    register_buffer,
    set_value,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.tensors import remove_unused
from pt2mx.kernels.select import supports
from pt2mx.ops.attention import matmul_bfloat16
from pt2mx.ops.hadamard import hadamard

aten = torch.ops.aten


def fold_weights(model: GraphModule) -> GraphModule:
    """Compute every quantization of a constant tensor now, by `quantize_mx` or an operator of torchao.

    The codes and scales become buffers next to the parameter they come from, named `<parameter>_data`,
    `<parameter>_scale` and, of formats with a scale a tensor, `<parameter>_tensor_scale`; a tensor quantized twice in
    the same way (a tied weight) gets one pair. Unused parameters and buffers are deleted. Changes `model` and returns
    it.
    """
    _fold_amaxes(model)
    compute_codes(model, constant_nodes(model.graph))
    _erase_assertions(model)
    return remove_unused(model)


def _erase_assertions(model: GraphModule) -> None:
    """Erase the assertions about constants: export asserts the dtype of a weight that it casts, which would keep the
    weight alive."""
    assertions = model.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    constants = constant_nodes(model.graph) if assertions else set()
    for node in assertions:
        if node.args[0] in constants:
            model.graph.erase_node(node)


def _fold_amaxes(model: GraphModule) -> None:
    """Store the magnitude that several weights share, from which their tensor scale follows."""
    scales = list(model.graph.find_nodes(op="call_function", target=ops.tensor_scale_mx))
    constants = constant_nodes(model.graph) if scales else set()
    for node in scales:
        amax = node_arg(node)
        is_shared = len(amax.users) > 1 and all(user.target is ops.tensor_scale_mx for user in amax.users)
        if is_shared and amax in constants and amax.op == "call_function":
            fold_constant(model, amax, f"{root_name(amax)}_amax")


def compute_codes(model: GraphModule, constants: set[Node]) -> None:
    """Make the users of each quantization of a constant tensor read buffers instead; the quantizations stay, unused."""
    packed: dict[Node, list[Node]] = {}
    equal = first_equal(model, constants)
    with torch.no_grad():
        for node in list(model.graph.nodes):
            if node in constants and _quantizes(node):
                first = equal[node]
                if first not in packed:
                    packed[first] = _pack(model, first)
                _replace(node, packed[first])
                _fold_scales(model, node)


def fold_all_weights(model: GraphModule) -> GraphModule:
    """Fold the weights of a model and of its subgraphs. Weights of subgraphs become operands of the calls. Changes
    `model` and returns it."""
    if not call_groups(model):
        return fold_weights(model)
    mark_constants(model)
    for graph in graph_modules(model):
        _erase_assertions(graph)
    hoist_weights(model)
    fold_weights(model)
    return merge_equal_operands(model)


def _quantizes(node: Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target is ops.quantize_mx or name.startswith(_QUANTIZATIONS)


def dequantizes(node: Node) -> bool:
    """Return whether a node dequantizes codes, of pt2mx or torchao."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target is ops.dequantize_mx or name.startswith(_DEQUANTIZATIONS)


#: prefixes of the names of torchao's quantization operators
_QUANTIZATIONS = ("quantized_decomposed::quantize_", "torchao::quantize_affine")
_DEQUANTIZATIONS = ("quantized_decomposed::dequantize_", "torchao::dequantize_affine")


def _pack(model: GraphModule, quantize: Node) -> list[Node]:
    """Register the results of a quantizing operator as buffers, and return the nodes that read them."""
    args, kwargs = torch.fx.map_arg((quantize.args, quantize.kwargs), lambda n: evaluate(model, n))
    results = function_of(quantize)(*args, **kwargs)
    named = (
        {"data": results} if isinstance(results, torch.Tensor) else dict(zip(("scale", "data"), results, strict=True))
    )
    root = root_name(node_arg(quantize))
    with model.graph.inserting_before(quantize):
        return [model.graph.get_attr(register_buffer(model, f"{root}_{suffix}", t)) for suffix, t in named.items()]


def _replace(quantize: Node, buffers: list[Node]) -> None:
    """Replace the results of a quantizing operator by buffers."""
    results = [(quantize, 0)]
    if len(buffers) > 1:
        results = [(user, args_of(user)[1]) for user in quantize.users if user.target is operator.getitem]
    for node, item in results:
        buffers[item].meta.update(node.meta)
        node.replace_all_uses_with(buffers[item])


def _fold_scales(model: GraphModule, quantize: Node) -> None:
    """Fold the scales that torchao computes from the tensor (dynamic quantization), which the dequantization reads
    too."""
    for argument, value in zip(operator_of(quantize)._schema.arguments[1:], quantize.args[1:], strict=False):
        if isinstance(value, Node) and value.op == "call_function":
            fold_constant(model, value, f"{root_name(node_arg(quantize))}_{argument.name}")


def fold_constant(model: GraphModule, node: Node, name: str) -> Node:
    """Register the value of a constant node as a buffer named `name`, numbered if needed, and return the node that
    reads it."""
    value = evaluate(model, node)
    if value.nbytes != value.untyped_storage().nbytes():
        value = value.clone()  # saving a view would save its whole storage
    with model.graph.inserting_before(node):
        buffer = model.graph.get_attr(register_buffer(model, name, value))
    buffer.meta.update(node.meta)
    node.replace_all_uses_with(buffer)
    return buffer


@graph_pass((LinearMX, Dequantize))
def unpack_weights(model: GraphModule) -> None:
    """Dequantize every weight to a buffer `<weight>_data_unpacked`, once for all of its users: `linear_mx` becomes
    `linear`, and convolutions and other users of a `dequantize_mx` read the buffer.

    The weights of embeddings, of `grouped_linear_mx` and of subgraphs stay packed. So do weights of matmuls that this
    machine's bfloat16 matrix instructions compute faster.
    """
    constants = {n for n in constant_nodes(model.graph) if all(c.op != "placeholder" for c in computed_from(n))}
    buffers: dict[tuple[object, ...], Node] = {}
    for node, matmul in LinearMX.calls_in(model.graph):
        k = (shape_of(matmul.x) or (None,))[-1]
        read = [n for n in (matmul.codes, matmul.scale, matmul.tensor_scale) if n is not None]
        if not constants.issuperset(read) or not isinstance(k, int):
            continue
        if matmul.target_dtype is None or not supports("multiply by packed weights", value_of(node), matmul.spec, k):
            constants.add(_use_plain_matmul(model, node, matmul, k))
    for node, call in Dequantize.calls_in(model.graph):
        if node in constants:
            axis = call.spec.axis % evaluate(model, call.codes).dim()
            weight = call.replace(spec=call.spec.replace(axis=axis), length=None), shape_of(node) or call.length
            if weight not in buffers:
                buffers[weight] = fold_constant(model, node, f"{root_name(node)}_unpacked")
            node.replace_all_uses_with(buffers[weight])
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()


def _use_plain_matmul(model: GraphModule, packed: Node, call: LinearMX, k: int) -> Node:
    """Replace a `linear_mx`, whose x is (..., k), and return the node of its dequantized weight."""
    if _is_of_tensor_cores(packed, call):
        return _use_tensor_cores(model, packed, call, k)
    with model.graph.inserting_before(packed):
        weight = model.graph.call_function(ops.dequantize_mx, _dequantize(call, value_of(packed).dtype, k).args)
        x = call.x
        if call.rotation:
            x = model.graph.call_function(hadamard, (x, call.rotation, -1))
            set_value(x)
        if dtype_of(x) != dtype_of(packed):
            x = model.graph.call_function(aten.to.dtype, (x, dtype_of(packed)))
            set_value(x)
        plain = model.graph.call_function(aten.linear.default, (x, weight, call.bias))
    set_value(weight)
    plain.meta.update(packed.meta)
    packed.replace_all_uses_with(plain)
    model.graph.erase_node(packed)
    return weight


def _dequantize(call: LinearMX, dtype: torch.dtype, k: int) -> Dequantize:
    """Return the call that dequantizes the weight of a `linear_mx`, whose x is (..., k)."""
    return Dequantize(call.codes, call.scale, call.spec, dtype, k, call.tensor_scale)


def _is_of_tensor_cores(packed: Node, call: LinearMX) -> bool:
    """Return whether a GPU matmul takes bfloat16, returns float32, and has known sizes, which reshaping x to two
    dimensions needs."""
    known = all(isinstance(n, int) for n in shape_of(packed) or (None,))
    if not known or call.target_dtype != torch.float32 or dtype_of(call.x) != torch.bfloat16:
        return False
    return supports("multiply x and weights rounded to bfloat16", value_of(packed))


def _use_tensor_cores(model: GraphModule, packed: Node, call: LinearMX, k: int) -> Node:
    """Replace a `linear_mx` by a bfloat16 matmul with a float32 result, and return the node of its dequantized
    weight."""

    def insert(target: OpOverload, *args: Any) -> Node:
        node = model.graph.call_function(target, args)
        set_value(node)
        return node

    with model.graph.inserting_before(packed):
        weight = insert(ops.dequantize_mx, *_dequantize(call, torch.bfloat16, k).args)
        rows = insert(aten.reshape.default, call.x, [-1, k])
        matmul = insert(matmul_bfloat16, rows, insert(aten.t.default, weight), torch.float32)
        plain = insert(aten.view.default, matmul, list(shape_of(packed) or ()))
        if call.bias is not None:
            plain = insert(aten.add.Tensor, plain, call.bias)
    plain.meta.update(packed.meta)
    packed.replace_all_uses_with(plain)
    model.graph.erase_node(packed)
    return weight
