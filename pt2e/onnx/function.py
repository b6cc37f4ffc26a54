"""ONNX functions under construction: written node by node, with blocks along an axis of a tensor of any rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.nodes import DOMAIN
from pt2mx.spec import MXSpec

onnx = import_extra("onnx", "onnx")

#: operators whose float constants have one dimension: onnxscript's optimizer drops a scalar factor within 1e-5 of one,
#: and a scalar term within 1e-8 of zero
_ARITHMETIC = {"Add", "Sub", "Mul", "Div"}

#: the sizes of a tensor, None for an unknown one; None for an unknown rank
Shape = tuple[int | None, ...] | None
#: an input of a node: the name of a value, or a constant; Python floats are float32, integers int64
Input = str | float | list[int] | np.ndarray


class Function:
    """A function under construction: the body of a node of the domain `pt2mx`.

    Args:
        name: the node's `op_type`.
        inputs: the names of the inputs.
        attributes: the names of the attributes that nodes have; the body does not use them.
    """

    def __init__(self, name: str, inputs: list[str], attributes: list[str]) -> None:
        self._name, self._inputs, self._attributes = name, inputs, attributes
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._nodes: list[Any] = []

    def op(self, op_type: str, *inputs: Input, output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        dimensions = 1 if op_type in _ARITHMETIC else 0
        names = [value if isinstance(value, str) else self._constant(value, dimensions) for value in inputs]
        output = output or f"{op_type.lower()}_{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(op_type, names, [output], **attributes))
        return output

    def proto(self, opset: int) -> Any:
        """Return the `FunctionProto`, whose output is Y."""
        imports = [onnx.helper.make_opsetid("", opset)]
        imports += [onnx.helper.make_opsetid(domain, 1) for domain in {node.domain for node in self._nodes} - {""}]
        return onnx.helper.make_function(
            DOMAIN, self._name, self._inputs, ["Y"], self._nodes, imports, attributes=self._attributes
        )

    def _constant(self, value: float | list[int] | np.ndarray, dimensions: int) -> str:
        if isinstance(value, float):
            array = np.full((1,) * dimensions, value, np.float32)
        else:
            array = value if isinstance(value, np.ndarray) else np.asarray(value, np.int64)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=onnx.numpy_helper.from_array(array))
        return self._constants[key]


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` values along `axis`: -1, or the dimension counted from the front.

    `length` is the size of that dimension, -1 if it is dynamic. `ahead` is the number of dimensions before it, and
    `behind` are the sizes of those after it, if they are known: then shapes are constants, from which onnxruntime knows
    the sizes of all values. It plans their memory faster, and computes in place.
    """

    axis: int
    size: int
    length: int
    ahead: int = -1
    behind: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: MXSpec, length: int, shape: Shape = None) -> Blocks:
        """Return the blocks of a spec, along a tensor of a shape; None for what is unknown of it. A single short block
        has the size of the dimension."""
        size = min(spec.block_size, length) if length > 0 else spec.block_size
        blocks = cls(spec.axis, size, length)
        if not shape or length <= 0:
            return blocks
        axis = spec.axis % len(shape)
        behind = tuple(n or 0 for n in shape[axis + 1 :])
        return replace(blocks, ahead=axis, behind=behind) if all(behind) else blocks

    @property
    def has_shape(self) -> bool:
        """Return whether shapes are constants."""
        return self.ahead >= 0

    def shaped(self, *along: int) -> list[int]:
        """Return a constant shape for Reshape with `along` in the position of the axis; 0 keeps a size."""
        return [0] * self.ahead + [*along, *self.behind]

    @property
    def inner(self) -> int:
        """Return the dimension of the values within a block, after the split."""
        return self.axis if self.axis < 0 else self.axis + 1

    @property
    def last_to_inner(self) -> list[int]:
        """Return the order of dimensions that moves a further one at the end behind the axis."""
        rank = self.ahead + 1 + len(self.behind)
        return [*range(self.ahead + 1), rank, *range(self.ahead + 1, rank)]

    @property
    def name(self) -> str:
        """Return a name that two functions share only if their bodies are equal."""
        if self.has_shape:
            sizes = "x".join(map(str, (self.length, *self.behind)))
            return f"b{self.size}_n{sizes}_axis{self.axis}_behind{self.ahead}"
        if not self._whole:
            length = f"_n{self.length}" if self.length > 0 else "_any"
            return f"b{self.size}{length}" + (f"_axis{self.axis}" if self.axis != -1 else "")
        return f"b{self.size}" + (f"_n{self.length}_axis{self.axis}" if self.axis != -1 else "")

    @property
    def _whole(self) -> bool:
        return self.length > 0 and self.length % self.size == 0

    def split(self, f: Function, x: str) -> str:
        """x: (..., n, ...) -> (..., blocks, block, ...), the last block filled with zeros.

        Whole blocks along the last axis are split to (blocks, block).
        """
        if self._whole and self.axis == -1 and not self.has_shape:
            return f.op("Reshape", x, [-1, self.size])
        length, count, padded = self._sizes(f, x)
        if not self._whole:
            last = f.op("Sub", padded, length) if self.length <= 0 else [-self.length % self.size]
            pads = f.op("Concat", [0], last, axis=0) if isinstance(last, str) else [0, *last]
            x = f.op("Pad", x, pads, "", [self.axis])
        return self.reshape(f, x, x, count, [self.size])

    def split_scale(self, f: Function, scale: str) -> str:
        """scale: (..., blocks, ...) -> (..., blocks, 1, ...), which broadcasts with the split values."""
        if self._whole:
            return replace(self, size=1, length=self.length // self.size).split(f, scale)
        return f.op("Unsqueeze", scale, [self.inner])

    def join(self, f: Function, blocks: str, x: str, output: str = "") -> str:
        """(..., blocks, block, ...) -> the shape of x."""
        if self._whole and self.has_shape:
            return f.op("Reshape", blocks, self.shaped(self.length), output=output)
        if self._whole:
            return f.op("Reshape", blocks, f.op("Shape", x), output=output, allowzero=1)
        length, _, padded = self._sizes(f, x)
        return f.op("Slice", self.reshape(f, blocks, x, padded), [0], length, [self.axis], output=output)

    def reshape(self, f: Function, x: str, like: str, *along: Input) -> str:
        """Reshape x to the shape of another tensor, with `along` in the position of the axis.

        No size is -1: ONNX cannot infer it if another size is 0.
        """
        if self.has_shape:
            constant: Any = along
            return f.op("Reshape", x, self.shaped(*(size for sizes in constant for size in sizes)))
        behind = [] if self.axis == -1 else [f.op("Shape", like, start=self.axis + 1)]
        shape = f.op("Concat", f.op("Shape", like, end=self.axis), *along, *behind, axis=0)
        return f.op("Reshape", x, shape, allowzero=1)

    def size_along(self, f: Function, x: str) -> str:
        """Return the size of x along the axis, (1,)."""
        if self.axis == -1:
            return f.op("Shape", x, start=-1)
        return f.op("Shape", x, start=self.axis, end=self.axis + 1)

    def _sizes(self, f: Function, x: str) -> tuple[Input, Input, Input]:
        """Return the size of x along the axis, the number of blocks, and the size with padding, each (1,)."""
        if self.length > 0:
            count = -(-self.length // self.size)
            return [self.length], [count], [count * self.size]
        length = self.size_along(f, x)
        blocks = f.op("Div", f.op("Add", length, [self.size - 1]), [self.size])
        return length, blocks, f.op("Mul", blocks, [self.size])
