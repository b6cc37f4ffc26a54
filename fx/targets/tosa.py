"""TOSA's block-scaled operators (TOSA 1.1, extension mxfp), as MLIR text."""

from __future__ import annotations

from torch.fx import GraphModule

from pt2mx.fx.targets import mlir
from pt2mx.fx.targets.parts import Matmul, Pair, parts_of
from pt2mx.fx.targets.table import Target

_BLOCK = "{block_size = #tosa.block_size<BLOCK_SIZE_32>}"


def to_tosa(model: GraphModule, target: Target) -> str:
    """Write a function for each linear layer, and for each other quantized tensor."""
    return "\n".join(_matmul(part) if isinstance(part, Matmul) else _pair(part) for part in parts_of(model))


def _pair(pair: Pair) -> str:
    codes, scale, values = mlir.types_of(pair)

    def back(operands: str) -> str:
        return f"%y = tosa.cast_from_block_scaled {operands} {_BLOCK} : ({codes}, {scale}) -> {values}"

    if pair.is_weight:
        line = back("%codes, %scale")
        return mlir.function(pair.name, (("codes", codes), ("scale", scale)), [line], ("%y", values))
    quantize = f"%q:2 = tosa.cast_to_block_scaled %x {_BLOCK} : ({values}) -> ({codes}, {scale})"
    lines = [quantize, back("%q#0, %q#1")]
    return mlir.function(pair.name, (("x", values),), lines, ("%y", values))


def _matmul(part: Matmul) -> str:
    """x: (1, M, K), weight: (1, N, K) -> (1, M, N) f32."""
    m, n = mlir.rows_of(part.x.shape), part.weight.shape[0]
    x_codes, x_scale, x = mlir.types_of(part.x, (1, m))
    codes, scale, _ = mlir.types_of(part.weight, (1, n))
    y = mlir.tensor((1, m, n), "f32")
    lines = [
        f"%q:2 = tosa.cast_to_block_scaled %x {_BLOCK} : ({x}) -> ({x_codes}, {x_scale})",
        f"%y = tosa.matmul_t_block_scaled %q#0, %q#1, %codes, %scale {_BLOCK} : "
        f"({x_codes}, {x_scale}, {codes}, {scale}) -> {y}",
    ]
    return mlir.function(part.name, (("x", x), ("codes", codes), ("scale", scale)), lines, ("%y", y))
