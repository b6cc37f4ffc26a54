"""Calls of pt2mx's operators, with their arguments by name.

`Quantize.of(node)` gives the arguments of a `quantize_mx` node, and None for any other. The tuple has them all,
defaults too: it, or a changed one made by `_replace`, can be the `args` of a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from pt2mx import ops
from pt2mx.ops import linear
from pt2mx.spec import MXSpec


class Quantize(NamedTuple):
    """Arguments of `quantize_mx`. x: (..., n, ...); axis: as it was written, also from the end."""

    x: Node
    element: str
    block_size: int
    axis: int
    scale_mode: str
    rounding: str
    seed: object

    @classmethod
    def of(cls, node: Node) -> Quantize | None:
        return cls(*_arguments(node)) if node.target is ops.quantize_mx else None

    @property
    def spec(self) -> MXSpec:
        return MXSpec(self.element, self.block_size, self.axis, self.scale_mode, self.rounding)


class FakeQuantize(NamedTuple):
    """Arguments of `fake_quantize_mx`: those of `quantize_mx` and what becomes of the gradient."""

    x: Node
    element: str
    block_size: int
    axis: int
    scale_mode: str
    rounding: str
    seed: object
    ste: str

    @classmethod
    def of(cls, node: Node) -> FakeQuantize | None:
        return cls(*_arguments(node)) if node.target is ops.fake_quantize_mx else None


class Dequantize(NamedTuple):
    """Arguments of `dequantize_mx`. codes and scale: uint8, as `quantize_mx` gives them; length: n, or None for all
    codes."""

    codes: Node
    scale: Node
    element: str
    block_size: int
    dtype: torch.dtype
    axis: int
    length: object

    @classmethod
    def of(cls, node: Node) -> Dequantize | None:
        return cls(*_arguments(node)) if node.target is ops.dequantize_mx else None


class LinearMX(NamedTuple):
    """Arguments of `linear_mx`. x: (..., K), codes and scale: of a weight (N, K), bias: (N,) or None."""

    x: Node
    codes: Node
    scale: Node
    bias: Node | None
    element: str
    block_size: int

    @classmethod
    def of(cls, node: Node) -> LinearMX | None:
        return cls(*_arguments(node)) if node.target is linear.linear_mx else None


def _arguments(node: Node) -> tuple:
    """All arguments of a call, in the order of the schema."""
    arguments = node.target._schema.arguments
    given = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return tuple(given.get(a.name, a.default_value) for a in arguments)
