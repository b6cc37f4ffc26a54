"""Custom calls of StableHLO: XLA's for dequantization and block-scaled matmuls, one of our own that quantizes."""

from __future__ import annotations

from torch.fx import GraphModule

from pt2mx.fx.targets import mlir
from pt2mx.fx.targets.parts import Matmul, Pair, parts_of
from pt2mx.fx.targets.table import Target


def to_stablehlo(model: GraphModule, target: Target) -> str:
    """Write a function for each linear layer, and for each other quantized tensor."""
    return "\n".join(_matmul(part) if isinstance(part, Matmul) else _pair(part) for part in parts_of(model))


def _pair(pair: Pair) -> str:
    codes, scale, values = mlir.types_of(pair)
    if pair.is_weight:
        line = _call("%y", "__op$dequantize", "%codes, %scale", f"({codes}, {scale}) -> {values}")
        return mlir.function(pair.name, (("codes", codes), ("scale", scale)), [line], ("%y", values))
    lines = [
        _quantize(pair, f"({values}) -> ({codes}, {scale})"),
        _call("%y", "__op$dequantize", "%q#0, %q#1", f"({codes}, {scale}) -> {values}"),
    ]
    return mlir.function(pair.name, (("x", values),), lines, ("%y", values))


def _matmul(part: Matmul) -> str:
    """x: (M, K), weight: (N, K) -> (M, N) f32."""
    m, n = mlir.rows_of(part.x.shape), part.weight.shape[0]
    x_codes, x_scale, x = mlir.types_of(part.x, (m,))
    codes, scale, _ = mlir.types_of(part.weight)
    y = mlir.tensor((m, n), "f32")
    kind = f"({x_codes}, {codes}, {x_scale}, {scale}) -> {y}"
    lines = [
        _quantize(part.x, f"({x}) -> ({x_codes}, {x_scale})"),
        _call("%y", "__op$block_scaled_dot", "%q#0, %codes, %q#1, %scale", kind),
    ]
    return mlir.function(part.name, (("x", x), ("codes", codes), ("scale", scale)), lines, ("%y", y))


def _quantize(pair: Pair, kind: str) -> str:
    spec = pair.spec
    config = (
        f"element={spec.element} block_size={spec.block_size} scale_mode={spec.scale_mode} rounding={spec.rounding}"
    )
    return _call("%q:2", "pt2mx.quantize_mx", "%x", kind, f' {{backend_config = "{config}"}}')


def _call(result: str, name: str, operands: str, kind: str, attributes: str = "") -> str:
    return f'{result} = stablehlo.custom_call @"{name}"({operands}){attributes} : {kind}'
