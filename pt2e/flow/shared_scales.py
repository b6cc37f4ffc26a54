"""Share one tensor scale between the weights of a module that multiply one input, such as queries, keys and values.

Runtimes compute such layers as one matmul with one tensor scale; so does `pt2mx.fx.passes.merge_linears`. The shared
scale is the scale of the largest magnitude of all weights. It costs little accuracy, because every block still has its
own scale.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import computed_from, constant_nodes, first_equal, placeholders_first
from pt2mx.fx.graph.node import args_of, node_arg, shape_of
from pt2mx.fx.graph.qdq import insert_amax
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.passes.packed_operands import MATMULS
from pt2mx.pt2e.observe.observer import MXObserver, observer_of

_Item = TypeVar("_Item", bound=Hashable)


def share_tensor_scales(model: GraphModule) -> None:
    """Pass to the observers of weights that share a tensor scale the largest magnitude of all, as a second argument.

    A weight is a constant matrix in a format with a tensor scale. It shares the scale with every weight of equal spec
    that a `linear`, `matmul`, `mm` or `addmm` of the same parent module multiplies with the same input. Weights that
    several operators use connect their groups.

    Args:
        model: a prepared graph, which is changed.
    """
    observers: dict[Node, MXObserver] = {}  # by their calls
    for node in model.graph.find_nodes(op="call_module"):
        observer = observer_of(node)
        if observer is not None and observer.static_scale is None and observer.spec.has_tensor_scale:
            observers[node] = observer
    if not observers:
        return
    # torchao observes a weight of a subgraph right after its placeholder: to compute the largest magnitude there, later
    # placeholders would move past others
    placeholders_first(model)
    constants = constant_nodes(model.graph)
    equal = first_equal(model, constants)
    weights: dict[Node, tuple[Node, tuple]] = {}  # call of an observer -> tensor, qscheme
    for node, observer in observers.items():
        tensor = node_arg(node)
        if tensor in constants:
            weights[node] = equal[tensor], observer.qscheme
    uses = [(user, node) for node in weights for user in node.users]
    keys = [(sibling_key(user, node), node) for user, node in uses]
    groups = connected(((key, weights[node][1]), weights[node]) for key, node in keys if key is not None)
    shared: dict[int, Node] = {}  # by the group
    for node, weight in weights.items():
        group = groups.get(weight, ())
        if len(group) > 1:
            tensors = [tensor for tensor, _ in group]
            if id(group) not in shared:
                for needed in dict.fromkeys(one for tensor in tensors for one in computed_from(tensor)):
                    if needed > node:
                        node.prepend(needed)
                shared[id(group)] = insert_amax(tensors, node)
            node.args = (node.args[0], shared[id(group)])
    model.recompile()


def sibling_key(matmul: Node, weight: Node) -> tuple[Node, str] | None:
    """Return the key that the matmuls of sibling weights share: the input before its observer, and the parent module.
    An encoder's output is an input of each layer of a decoder, but runtimes compute each layer by itself.

    None if it is no matmul of an input with this weight (or its observer's call), and for an empty weight or no matrix.
    """
    known, shape = MATMULS.get(str(matmul.target)), shape_of(weight)
    if known is None or args_of(matmul)[known.weight] is not weight or shape is None or len(shape) != 2 or 0 in shape:
        return None
    x = node_arg(matmul, known.x)
    return (node_arg(x) if x.op == "call_module" else x), module_name(matmul).rpartition(".")[0]


def connected(pairs: Iterable[tuple[Hashable, _Item]]) -> dict[_Item, list[_Item]]:
    """Group items that have a key in common, directly or through other items.

    Return item -> the items of its group, itself included, the same list for each of them.
    """
    groups: dict[_Item, list[_Item]] = {}
    first: dict[Hashable, _Item] = {}
    for key, item in pairs:
        group, other = groups.setdefault(item, [item]), groups[first.setdefault(key, item)]
        if other is not group:
            other += group
            groups.update(dict.fromkeys(group, other))
    return groups
