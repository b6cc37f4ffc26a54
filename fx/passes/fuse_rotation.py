"""Fuse the Hadamard rotation of an input into its consumer: the kernel that quantizes it, or the linear layer."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import FakeQuantize, Hadamard, LinearMX, RotatedFakeQuantize, shape_of
from pt2mx.fx.graph.tensors import erase_unused, replace_node
from pt2mx.modes import ROUNDINGS


@graph_pass(Hadamard, (FakeQuantize, LinearMX))
def fuse_rotation(model: GraphModule) -> None:
    """Fuse a `hadamard` along the last dimension into its only user.

    `fake_quantize_mx(hadamard(x))` becomes `rotated_fake_quantize_mx`; `linear_mx(hadamard(x))` gets the argument
    `rotation`. The pass skips clipped gradients, random roundings, scales other than E8M0, and linear layers whose
    input the graph writes.
    """
    written = written_nodes(model.graph)
    for node, quantize in FakeQuantize.calls_in(model.graph):
        rotation = _rotation(quantize.x)
        along_last = rotation is not None and quantize.spec.axis in (-1, len(shape_of(quantize.x) or ()) - 1)
        if rotation is None or not along_last or quantize.ste != "identity" or ROUNDINGS[quantize.spec.rounding].random:
            continue
        if not quantize.spec.has_plain_scale:
            continue
        args = RotatedFakeQuantize(rotation.x, rotation.size, quantize.spec).args
        with model.graph.inserting_before(quantize.x):
            fused = model.graph.call_function(RotatedFakeQuantize.overload, args)
        replace_node(node, fused)
    for node, call in LinearMX.calls_in(model.graph):
        rotation = _rotation(call.x)
        if rotation is None or call.rotation or not written.isdisjoint((rotation.x, call.x)):
            continue
        node.args = call.replace(x=rotation.x, rotation=rotation.size).args
        erase_unused(call.x)


def _rotation(node: Node) -> Hadamard | None:
    """Return the rotation along the last dimension that a node with one user computes; None for other nodes."""
    call, shape = Hadamard.of(node), shape_of(node)
    if call is None or shape is None or len(node.users) > 1 or call.axis not in (-1, len(shape) - 1):
        return None
    return call
