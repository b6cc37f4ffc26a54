"""Circle's logical pair `circle_custom::quantize_mx`, `dequantize_mx`, which TICO folds into the types of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.node import Dequantize, args_of, register_buffer, tensor_of
from pt2mx.fx.graph.tensors import remove_unused, replace_node
from pt2mx.fx.targets.operators import operator_of
from pt2mx.fx.targets.pairs import Pair, quantized_input

_SCHEMA = '(Tensor input_, str elem_format, int axis, str shared_exp_method="max", str round="nearest") -> Tensor'
_HOME = "tico.utils.register_custom_op"
_ELEMENTS = {"fp4": "fp4_e2m1"}


def to_circle(model: GraphModule, pairs: Sequence[Pair], elements: Mapping[str, str]) -> GraphModule:
    """Write each quantized tensor as Circle's pair. A weight is a float constant that quantizes to itself."""
    quantize = operator_of("circle_custom::quantize_mx", _SCHEMA, _HOME, _quantize)
    dequantize = operator_of("circle_custom::dequantize_mx", _SCHEMA, _HOME, _dequantize)
    for pair in pairs:
        element = elements[pair.spec.element.name]
        with model.graph.inserting_before(pair.node):
            if pair.is_weight:
                weight = _float_weight(model, pair, element)
                x = model.graph.get_attr(register_buffer(model, pair.name, weight))
                x.meta["val"] = pair.node.meta["val"]
            else:
                x = quantized_input(pair)
            described = (element, pair.spec.axis, "max", "nearest")
            first = model.graph.call_function(quantize, (x, *described))
            second = model.graph.call_function(dequantize, (first, *described))
        first.meta.update(pair.node.meta)
        replace_node(pair.node, second)
    return remove_unused(model)


def _float_weight(model: GraphModule, pair: Pair, element: str) -> Tensor:
    """Return the values of a weight, which Circle's compiler quantizes again."""
    call = Dequantize.expect(pair.node)
    codes, scale, *others = args_of(pair.node)
    weight = ops.dequantize_mx(tensor_of(model, codes), tensor_of(model, scale), *others)
    again = _quantize(weight, element, pair.spec.axis)
    if not torch.equal(again, weight):
        raise MXError(
            f"{pair.name} does not quantize to itself by Circle's formulas: quantize it with "
            f"{call.spec.element.name}(floor)"
        )
    return weight


def _quantize(input_: Tensor, elem_format: str, axis: int, method: str = "max", rounding: str = "nearest") -> Tensor:
    """Return the values of the logical tensor: Circle's pair has no codes."""
    if input_.is_meta:
        return torch.empty_like(input_)
    element = _ELEMENTS.get(elem_format, elem_format)
    return ops.fake_quantize_mx(input_, element, 32, axis, "floor", "half_away", None, "identity")


def _dequantize(input_: Tensor, elem_format: str, axis: int, method: str = "max", rounding: str = "nearest") -> Tensor:
    return input_.clone()
