"""On a GPU, weights of products are kept in the order of its tensor cores, once and for all."""

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.formats import ELEMENTS
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import LinearMX, dtype_of, shape_of
from pt2mx.fx.graph.tensors import erase_unread
from pt2mx.fx.passes.fold_weights import register
from pt2mx.kernels.gpu.mma_layout import to_fragments
from pt2mx.kernels.select import runs_triton
from pt2mx.ops import linear, mma_layout


@GraphPass
def use_mma_layout(model: GraphModule, everywhere: bool = False) -> None:
    """Let `linear_mx` of bfloat16 read its weight as fragments (`linear_mx_fragments`).

    The codes and scales become buffers `<weight>_data_f` and `<weight>_scale_f`; those that something else reads too,
    as the embedding of a tied weight, stay beside them. Products stay as they are on another device (unless
    `everywhere`), with a weight that is an input or that fragments cannot hold (`to_fragments`), and of K that 8 does
    not divide.
    """
    constants = constant_nodes(model.graph)
    buffers: dict[tuple[object, ...], tuple[str, str] | None] = {}
    for node in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        x, data, scale, _, element, block_size = LinearMX.of(node)
        if not all(n.op == "get_attr" and n in constants for n in (data, scale)) or not _fits(x):
            continue
        codes: Tensor = operator.attrgetter(data.target)(model)
        if not everywhere and not (codes.device.type == "cuda" and runs_triton(codes.device)):
            continue
        key = data.target, scale.target, element, block_size
        if key not in buffers:
            scales = operator.attrgetter(scale.target)(model)
            found = to_fragments(codes, scales, ELEMENTS[element], block_size)
            names = f"{data.target}_f", f"{scale.target}_f"
            buffers[key] = found and tuple(register(model, *pair) for pair in zip(names, found, strict=True))
        if buffers[key] is not None:
            _replace(model, node, buffers[key], len(codes))


def _fits(x: Node) -> bool:
    shape = shape_of(x)
    return dtype_of(x) == torch.bfloat16 and bool(shape) and isinstance(shape[-1], int) and shape[-1] % 8 == 0


def _replace(model: GraphModule, node: Node, names: tuple[str, str], n: int) -> None:
    x, data, scale, bias, element, _ = LinearMX.of(node)
    with model.graph.inserting_before(node):
        read = [model.graph.get_attr(name) for name in names]
        new = model.graph.call_function(mma_layout.linear_mx_fragments, (x, *read, bias, element, n))
    for buffer, old in zip(read, (data, scale), strict=True):
        buffer.meta.update(old.meta)
        if "val" in old.meta:
            buffer.meta["val"] = old.meta["val"].new_empty(operator.attrgetter(buffer.target)(model).shape)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    erase_unread(node)
