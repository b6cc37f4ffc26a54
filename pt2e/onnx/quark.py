"""The target "quark": AMD Quark's own nodes in the place of ours, each with a body of standard operators.

Stock onnxruntime runs the bodies; where Quark's library of custom operators is registered, it runs its kernels. Weights
stay packed, behind `DequantizeMX` with its body: Quark stores float weights before its nodes, up to eight times as
large, and what a node would make of values that are quantized already is these values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pt2mx import quark
from pt2mx.errors import MXError
from pt2mx.formats import FORMATS
from pt2mx.pt2e.onnx.bodies import add_bodies, fake_quantize
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.nodes import DOMAIN, FakeQuantizeMX, graphs_in
from pt2mx.pt2e.onnx.opsets import opset_of
from pt2mx.pt2e.onnx.shapes import tensor_types
from pt2mx.spec import MXSpec

#: the names of Quark's operator, the newer first, and their domains
OPERATORS = {"MXQuantizeDequantize": "com.amd.quark", "MXFixNeuron": "com.vai.quantize"}
#: of integers, that of Quark's ready-made configs first
_ROUNDING_MODES = (2, 0, 1)


def to_quark(model: Any) -> Any:
    """Make Quark's node of each `FakeQuantizeMX` of a model, give all nodes bodies, and return the model.

    Raises:
        MXError: for a spec that Quark's node has no attributes for; it names the node.
    """
    op_type, domain = next(iter(OPERATORS.items()))
    for node, ours in FakeQuantizeMX.nodes_in(model):
        attributes = attributes_of(ours.spec)
        if attributes is None:
            raise MXError(
                f"{node.name}: Quark has no node of {ours.spec}: it has the six OCP elements with scale mode floor, "
                "floats rounded to even, and integers that reach -128 (int8_full)"
            )
        made = onnx.helper.make_node(op_type, node.input, node.output, node.name, domain=domain, **attributes)
        node.CopyFrom(made)
    kept = [f for f in model.functions if f.domain != DOMAIN or not f.name.startswith(FakeQuantizeMX.op_type)]
    del model.functions[:]
    model.functions.extend(kept)
    return add_quark_bodies(add_bodies(model))


def attributes_of(spec: MXSpec) -> dict[str, Any] | None:
    """The attributes of Quark's node that computes a spec; None where none does."""
    element = spec.element.name.removesuffix("_full")
    for mode in _ROUNDING_MODES if element in FORMATS else ():
        attributes = {
            "element_dtype": element, "axis": spec.axis, "block_size": spec.block_size, "rounding_mode": mode,
        }  # fmt: skip
        if quark.mx_spec(attributes) == spec:
            return attributes
    return None


def quark_nodes(model: Any) -> Iterator[Any]:
    """The nodes of Quark's operator in a model, in its branches and loops too."""
    for graph in graphs_in(model.graph):
        yield from (node for node in graph.node if OPERATORS.get(node.op_type) == node.domain)


def add_quark_bodies(model: Any) -> Any:
    """Give each of Quark's nodes in a model that has none its function, one of each spec, and return the model.

    The nodes of the most frequent spec stay as they are; those of another say by `overload` which function is theirs.

    Raises:
        MXError: for attributes that Quark's operator does not have; it names the node.
    """
    types = tensor_types(model, lambda node: OPERATORS.get(node.op_type) == node.domain)
    ranks = {name: len(found.shape) for name, found in types.items() if found.shape is not None}
    held = {(f.domain, f.name, f.overload) for f in model.functions}
    bare = [node for node in quark_nodes(model) if (node.domain, node.op_type, node.overload) not in held]
    specs = [(node, _spec(node, ranks)) for node in bare]
    opset = opset_of(model)
    for op_type, domain in OPERATORS.items():
        counts = Counter(spec for node, spec in specs if node.op_type == op_type)
        overloads: dict[MXSpec, str] = {}
        for spec, _ in counts.most_common():
            function = fake_quantize(spec, opset)
            if overloads:
                function.overload = function.name.partition(".")[2]
            overloads[spec] = function.overload
            function.domain, function.name = domain, op_type
            del function.attribute[:]
            function.attribute_proto.extend(onnx.helper.make_attribute(*item) for item in _DEFAULTS)
            model.functions.append(function)
        for node, spec in specs:
            if node.op_type == op_type and overloads[spec]:
                node.overload = overloads[spec]
        if counts and not any(entry.domain == domain for entry in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return model


_DEFAULTS = tuple(quark.MX_OP_DEFAULT_ATTRS.items())


def _spec(node: Any, ranks: dict[str, int]) -> MXSpec:
    """The spec of a node, its axis -1 or counted from the front. A vector has its blocks along its only dimension."""
    if len(node.input) != 1:
        raise MXError(f"{node.op_type} {node.name!r} has {len(node.input)} inputs, and Quark's operator one")
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    values = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    try:
        spec, rank = quark.mx_spec(values), ranks.get(node.input[0])
    except MXError as error:
        raise MXError(f"{node.op_type} {node.name!r}: {error}") from None
    axis = spec.axis
    if rank is None:
        if axis < -1:
            raise MXError(
                f"{node.op_type} {node.name!r}: axis={axis} of a tensor of unknown rank; count from the front"
            )
    elif rank == 1:
        axis = -1
    elif not -rank <= axis < rank:
        raise MXError(f"{node.op_type} {node.name!r}: axis={axis} is out of range for a tensor of rank {rank}")
    elif axis < -1:
        axis += rank
    return spec.replace(axis=axis)
