"""Removal of what nothing in a graph reads any more."""

from __future__ import annotations

from onnx import GraphProto

from pt2mx.pt2e.onnx.nodes import graphs_in

#: operators whose nodes only rearrange what they read
_REARRANGING = ("Transpose", "Identity", "Gather")


def remove_unread(graph: GraphProto) -> None:
    """Take away the constants of a graph that nothing reads, not in the graphs inside either, and the nodes that made
    other arrangements of them."""
    inside = [inner for inner in graphs_in(graph) if inner is not graph]
    read = {name for inner in inside for node in inner.node for name in node.input}
    read |= {output.name for each in (graph, *inside) for output in each.output}
    kept = []
    for node in reversed(graph.node):
        if node.op_type not in _REARRANGING or not read.isdisjoint(node.output):
            read |= set(node.input)
            kept.append(node)
    nodes = kept[::-1]
    initializers = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)
