"""The weights of prepared models that are sliced from an anchor: find them, check their formats, and train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.constants import root_name
from pt2mx.fx.graph.higher_order_ops import captured_operands
from pt2mx.fx.graph.node import name_of, node_arg
from pt2mx.pt2e.flow.weights import observers_of_constants
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.spec import MXSpec


def check_narrower(name: str, spec: MXSpec, anchor: MXSpec) -> None:
    """Raise an MXError unless a weight in the format `anchor` can be sliced to `spec`."""
    if spec.element.bits > anchor.element.bits:
        raise MXError(
            f"{name} is {anchor.element.name}, and the recipe's {spec.element.name} is wider: give a recipe of at most "
            f"{anchor.element.bits} bits, or quantize the float model with this one"
        )
    if (spec.block_size, spec.block_rows) != (anchor.block_size, anchor.block_rows):
        raise MXError(
            f"{name} has blocks of {anchor.blocks}, and the recipe blocks of {spec.blocks}: slicing keeps blocks, so "
            f"give a recipe with blocks of {anchor.blocks}"
        )


def check_sliceable(name: str, spec: MXSpec, anchor: MXSpec) -> None:
    """Raise an MXError unless a weight in `spec` can be rounded or trained as a slice of `anchor`: its scales must be
    powers of two, which follow from its own values."""
    check_narrower(name, spec, anchor)
    for one in (spec, anchor):
        if not one.has_power_of_two_scale or one.block_rows > 1:
            raise MXError(f"{name} in {spec} is no slice of {anchor}: choose formats with E8M0 scales of one row")


def set_anchors(prepared: GraphModule, anchor: GraphModule) -> None:
    """Slice the weights of a model that was prepared for training from the weights of another one, prepared from the
    same exported model. Changes `prepared`."""
    specs = {}
    for observer, names in observed_weights(anchor):
        for name in names:
            specs[name, observer.spec.axis] = observer.spec
    sliced = False
    for observer, names in observed_weights(prepared):
        for name in sorted(names):
            spec = specs.get((name, observer.spec.axis))
            if isinstance(observer, MXFakeQuantize) and spec is not None:
                check_sliceable(name, observer.spec, spec)
                observer.anchor, sliced = spec, True
    if not sliced:
        raise MXError("the anchor quantizes none of the weights: prepare both from the same exported model")
    _share_buffers(prepared, anchor)


def _share_buffers(prepared: GraphModule, anchor: GraphModule) -> None:
    """Make a model write to the buffers of the anchor: a batch norm has one running variance, which scales weights."""
    buffers = dict(anchor.named_buffers())
    for name in {name_of(node) for node in prepared.graph.find_nodes(op="get_attr")} & buffers.keys():
        path, _, attribute = name.rpartition(".")
        prepared.get_submodule(path)._buffers[attribute] = buffers[name]


def observed_weights(prepared: GraphModule) -> Iterator[tuple[MXObserver, set[str]]]:
    """Yield the observers of the constants of a prepared model, each with the names of the parameters that it observes:
    one, or in a subgraph one for each call."""
    captured = captured_operands(prepared)
    for node, observer in observers_of_constants(prepared):
        yield observer, _parameters(node_arg(node), captured)


def _parameters(node: Node, captured: Mapping[Node, list[object]]) -> set[str]:
    """Return the names of the first parameters from which the values of a constant are computed."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
    roots = captured.get(node, [node])
    return {root_name(root) for root in roots if isinstance(root, Node)}
