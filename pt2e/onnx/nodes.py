"""The two nodes of the domain `pt2mx`: they mark the tensors of an ONNX graph that are in an MX format.

The attributes of a node describe it completely; the other dialects are written from them alone.

`FakeQuantizeMX`: X float32, float16 or bfloat16 -> Y of X's type and shape, `fake_quantize_mx` of X to the bit. Of a
format with a scale a tensor, a second input is that scale, () float32; without it the scale is X's own.
`DequantizeMX`: codes uint8, packed along the axis as `quantize_mx` stores them, scales in the type of their format, and
the scale of the tensor where the format has one -> Y, `dequantize_mx` of them to the bit.

| attribute | of | |
|---|---|---|
| `element` string | both | a key of `pt2mx.ELEMENTS` |
| `block_size` int | both | values that share a scale |
| `axis` int | both | -1 for the last dimension, otherwise the dimension counted from the front |
| `length` int | both | values along the axis; -1 where it is dynamic, or, for codes, all that the bytes contain |
| `scale_format` string, `block_rows` int | both | a key of `pt2mx.SCALE_FORMATS`, `e8m0` by default; rows of a block |
| `scale_mode`, `rounding` string | `FakeQuantizeMX` | keys of `SCALE_MODES` (`FLOAT_SCALE_MODES`) and `ROUNDINGS` |
| `dtype` int | `DequantizeMX` | the type of Y, a `TensorProto.DataType` |

`pt2mx.pt2e.onnx.function_bodies.add_bodies(model)` gives each node an ONNX function of standard operators. The name of
the function becomes the node's `op_type`: one of the two above, a dot, and the spec. The attributes stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pt2mx.extras import import_extra
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    import onnx
    from typing_extensions import Self

#: the domain of the nodes and their functions
DOMAIN = "pt2mx"
#: the version of that domain
VERSION = 1
#: attributes of both nodes
_OF_BLOCKS = ("element", "block_size", "axis", "length", "scale_format", "block_rows")


@dataclass(frozen=True)
class MXNode:
    """What a node says: its spec, whose axis is counted as above, and the length. Each subclass is one operator."""

    op_type: ClassVar[str]
    #: the names of the attributes, in order
    names: ClassVar[tuple[str, ...]]

    spec: MXSpec
    length: int = -1

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by name, in order."""
        spec = {**vars(self.spec), "element": self.spec.element.name, "scale_format": self.spec.scale_format.name}
        values = {**spec, **vars(self)}
        return {name: values[name] for name in self.names}

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Self | None:
        """Return what a node of this operator says, with or without a function; None for another node."""
        if node.domain != DOMAIN or node.op_type.partition(".")[0] != cls.op_type:
            return None
        values = node_attributes(node)
        own = {name: values.pop(name) for name in ("length", "dtype") if name in values}
        return cls(MXSpec(**values), **own)

    @classmethod
    def nodes_in(cls, model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, Self]]:
        """Yield the nodes of this operator in a model and its subgraphs, each with what it says."""
        for graph in graphs_in(model.graph):
            for node in graph.node:
                if (said := cls.of(node)) is not None:
                    yield node, said

    def make(self, inputs: list[str], output: str, name: str = "") -> onnx.NodeProto:
        """Return a node with these attributes. Its inputs are X, or codes and scales, and a scale of the tensor."""
        helper = import_extra("onnx", "onnx").helper
        return helper.make_node(self.op_type, inputs, [output], name, domain=DOMAIN, **self.attributes)


@dataclass(frozen=True)
class FakeQuantizeMX(MXNode):
    """`FakeQuantizeMX`: X -> Y."""

    op_type: ClassVar[str] = "FakeQuantizeMX"
    names: ClassVar[tuple[str, ...]] = (*_OF_BLOCKS, "scale_mode", "rounding")


@dataclass(frozen=True)
class DequantizeMX(MXNode):
    """`DequantizeMX`: codes, scales -> Y; `dtype` 1 is float32, 10 float16, 16 bfloat16. No attribute says the scale
    mode and rounding of the spec: codes are rounded already."""

    op_type: ClassVar[str] = "DequantizeMX"
    names: ClassVar[tuple[str, ...]] = (*_OF_BLOCKS, "dtype")

    dtype: int = 1


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its subgraphs: the bodies of `If`, `Loop` and `Scan`."""
    yield graph
    for node in graph.node:
        yield from subgraphs_of(node)


def subgraphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of a node (If, Loop, Scan), and their own subgraphs."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            if graph.node:
                yield from graphs_in(graph)


def node_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name, with text as `str`."""
    helper = import_extra("onnx", "onnx").helper
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
