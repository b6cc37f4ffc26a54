"""The packed weights of a converted model, and what each module does with its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.attributes import name_of, tensor_of
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Dequantize, is_ours
from pt2mx.fx.graph.qdq import quantize_of, spec_of_dequantize
from pt2mx.fx.graph.source_node import module_name
from pt2mx.pt2e.quantizer.operators import operand_node, operands_of, operator_name, quantizable_operators
from pt2mx.spec import MXSpec

#: what folding, and rounding before it, add to a parameter's name
_DATA = re.compile(r"(_rounded)?_data(_\d+)?$")


@dataclass(frozen=True)
class Use:
    """A packed weight in a module.

    Args:
        module: qualified name of the module, as the graph has it.
        weight: qualified name of the parameter.
        element: of the codes.
        block_size: values that share a scale.
        data: (..., N, bytes of K) uint8, whatever the axis of the graph's.
        scale: (..., N, blocks of K) uint8.
        inputs: the spec of what the module multiplies with it; None: in high precision.
    """

    module: str
    weight: str
    element: str
    block_size: int
    data: Tensor
    scale: Tensor
    inputs: MXSpec | None


def uses_of(model: GraphModule) -> list[Use]:
    """Every packed weight of a converted model, for each operator that multiplies or gathers it.

    Raises:
        MXError: where anything but such weights and their inputs is quantized, naming it.
    """
    inner = [node for graph in graph_modules(model)[:-1] for node in graph.graph.nodes if is_ours(node)]
    found, explained = [], set()
    for node in quantizable_operators(model.graph):
        weights: list[Node] = []
        inputs: list[Node] = []
        for operand in operands_of(node):
            argument = operand_node(node, operand)
            to = None if argument is None else Dequantize.of(argument)
            if argument is None or to is None or operand.name == "bias":
                continue
            (weights if to.codes.op == "get_attr" else inputs).append(argument)
        if len(weights) == 1 and len(inputs) < 2:
            explained |= {*weights, *inputs, *filter(None, map(quantize_of, inputs))}
            found.append(_use(model, node, weights[0], inputs))
    for node in (*inner, *(node for node in model.graph.nodes if is_ours(node) and node not in explained)):
        raise MXError(
            f"{module_name(node) or node.name} calls {operator_name(node.target)} for what is neither a weight nor the "
            "input of a product with one: a checkpoint has no place for it; leave it in high precision"
        )
    return found


def _use(model: GraphModule, node: Node, weight: Node, inputs: list[Node]) -> Use:
    to = Dequantize.expect(weight)
    data, scale = (tensor_of(model, held).movedim(to.axis, -1) for held in (to.codes, to.scale))
    specs = list(map(spec_of_dequantize, inputs))
    for argument, spec in zip(inputs, specs, strict=True):
        if spec.axis % argument.meta["val"].dim() != argument.meta["val"].dim() - 1:
            raise MXError(f"inputs of {module_name(node)} have blocks along dimension {spec.axis}, not the last one")
    name = _DATA.sub("", name_of(to.codes))
    return Use(module_name(node), name, to.element, to.block_size, data, scale, specs[0] if specs else None)


def float_tensors(model: GraphModule) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that are no codes, by every name."""
    packed = {
        name_of(held)
        for node in model.graph.nodes
        if (to := Dequantize.of(node))
        for held in (to.codes, to.scale)
        if held.op == "get_attr"
    }
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return ((name, tensor.detach()) for name, tensor in named if name not in packed)
