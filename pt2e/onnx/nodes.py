"""The two nodes of the domain `pt2mx`, by which an ONNX graph says that a tensor is in an MX format.

Everything that a node means is in its attributes; the writers of targets read and replace nodes by them alone.

`FakeQuantizeMX`: X float32, float16 or bfloat16 -> Y of X's type and shape, `fake_quantize_mx` of X to the bit.
`DequantizeMX`: codes uint8, packed along the axis as `quantize_mx` stores them, and scales uint8, E8M0 -> Y,
`dequantize_mx` of both to the bit.

| attribute | of | |
|---|---|---|
| `element` string | both | a key of `pt2mx.ELEMENTS` |
| `block_size` int | both | values that share a scale |
| `axis` int | both | -1 for the last dimension, otherwise the dimension counted from the front |
| `length` int | both | values along the axis; -1 where that is dynamic, of codes where it is all that the bytes hold |
| `scale_mode`, `rounding` string | `FakeQuantizeMX` | keys of `SCALE_MODES` and `ROUNDINGS` |
| `dtype` int | `DequantizeMX` | the type of Y, a `TensorProto.DataType` |

`pt2mx.pt2e.onnx.bodies.add_bodies(model)` gives each node a function of standard operators. Its name, which becomes the
node's `op_type`, begins with the one above and goes on with a dot and the spec; the attributes stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pt2mx.extras import import_extra
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    import onnx
    from typing_extensions import Self

#: of the nodes, and of the functions that are their bodies
DOMAIN = "pt2mx"
#: of that domain
VERSION = 1


@dataclass(frozen=True)
class MXNode:
    """The attributes of a node. A subclass is one operator and, in the order of their names here, its attributes."""

    op_type: ClassVar[str]

    element: str
    block_size: int = 32
    axis: int = -1
    length: int = -1

    @property
    def spec(self) -> MXSpec:
        """The spec of the codes, without the modes, which are in them."""
        return MXSpec(self.element, self.block_size, self.axis)

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Self | None:
        """The attributes of a node of this operator, with or without a body; None for another node."""
        if node.domain != DOMAIN or node.op_type.partition(".")[0] != cls.op_type:
            return None
        helper = import_extra("onnx", "onnx").helper
        values: dict[str, Any] = {}
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            values[attribute.name] = value.decode() if isinstance(value, bytes) else value
        return cls(**values)

    @classmethod
    def nodes_in(cls, model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, Self]]:
        """The nodes of this operator in a model, in its branches and loops too, each with its attributes."""
        for graph in graphs_in(model.graph):
            for node in graph.node:
                if (attributes := cls.of(node)) is not None:
                    yield node, attributes

    def make(self, inputs: list[str], output: str, name: str = "") -> onnx.NodeProto:
        """A node with these attributes: of X, or of codes and scales."""
        helper = import_extra("onnx", "onnx").helper
        return helper.make_node(self.op_type, inputs, [output], name, domain=DOMAIN, **asdict(self))

    def replace(self, **changes: object) -> Self:
        """These attributes with some changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FakeQuantizeMX(MXNode):
    """`FakeQuantizeMX`: X -> Y."""

    op_type: ClassVar[str] = "FakeQuantizeMX"

    scale_mode: str = "floor"
    rounding: str = "even"

    @property
    def spec(self) -> MXSpec:
        """The spec by which X is quantized."""
        return MXSpec(self.element, self.block_size, self.axis, self.scale_mode, self.rounding)


@dataclass(frozen=True)
class DequantizeMX(MXNode):
    """`DequantizeMX`: codes, scales -> Y; `dtype` 1 is float32, 10 float16, 16 bfloat16."""

    op_type: ClassVar[str] = "DequantizeMX"

    dtype: int = 1


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside its nodes: bodies of `If`, `Loop` and `Scan`."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from graphs_in(inner)
