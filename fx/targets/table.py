"""The table of targets, and `translate`: write a converted model's MX operators in the dialect of another compiler.

A target is a row of `TARGETS` and a function. The row says which formats the dialect has, so that `translate` refuses
others before the function runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from pt2mx.errors import MXError, nearest
from pt2mx.formats import FORMATS
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.targets.parts import Pair, pairs_of

#: element -> its type in MLIR
MLIR_ELEMENTS = {
    "fp8_e4m3": "f8E4M3FN",
    "fp8_e5m2": "f8E5M2",
    "fp6_e3m2": "f6E3M2FN",
    "fp6_e2m3": "f6E2M3FN",
    "fp4_e2m1": "f4E2M1FN",
}


@dataclass(frozen=True)
class Target:
    """A dialect with MX operators.

    Args:
        adapter: "module:function" of the adapter. It takes (model, row) and returns the graph module, which it may
            change, or text.
        writes: the operators that the adapter writes.
        elements: element format -> its name in the dialect.
        activations: the elements of activations; empty if the dialect has no operator that quantizes.
        scale_modes, roundings: scale modes and roundings that the dialect's quantizing operator computes; empty for
            any, where the operator says them.
        block_sizes: the sizes of a block; empty for any.
        any_axis: False if blocks run along the last dimension only.
        whole_blocks: True if the size along the axis must be a multiple of the block size.
        matrices: True if tensors have two dimensions.
    """

    adapter: str
    writes: tuple[str, ...]
    elements: Mapping[str, str]
    activations: frozenset[str] = frozenset()
    scale_modes: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = (32,)
    any_axis: bool = False
    whole_blocks: bool = True
    matrices: bool = False

    def load(self) -> Callable[[GraphModule, Target], GraphModule | str]:
        """Return the adapter."""
        module, function = self.adapter.split(":")
        return getattr(importlib.import_module(f"pt2mx.fx.targets.{module}"), function)


TARGETS: dict[str, Target] = {
    # ExecuTorch's `executorch.extension.llm.export.mx`; its MLX backend reads the operator
    "torchao": Target(
        "torchao:to_torchao",
        ("torchao::dequantize_mx",),
        {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"},
        block_sizes=(),
        matrices=True,
    ),
    # Samsung's TICO, for Circle files of ONE: the formulas of microxcaling, round="nearest" is half away from zero
    "circle": Target(
        "circle:to_circle",
        ("circle_custom::quantize_mx", "circle_custom::dequantize_mx"),
        {**{name: name for name in FORMATS}, "fp4_e2m1": "fp4"},
        frozenset(FORMATS),
        ("floor",),
        ("half_away",),
        any_axis=True,
        whole_blocks=False,
    ),
    # TOSA 1.1 with the extension mxfp; ExecuTorch's Arm backend emulates its cast by scales that are rounded up
    "tosa": Target(
        "tosa:to_tosa",
        ("tosa.cast_to_block_scaled", "tosa.cast_from_block_scaled", "tosa.matmul_t_block_scaled"),
        MLIR_ELEMENTS,
        frozenset(MLIR_ELEMENTS),
        ("rceil",),
        ("even",),
    ),
    # the custom calls of XLA's BlockScalingRewriter; activations are quantized by a call of our own, which says how
    "stablehlo": Target(
        "stablehlo:to_stablehlo",
        ("@pt2mx.quantize_mx", "@__op$dequantize", "@__op$block_scaled_dot"),
        MLIR_ELEMENTS,
        frozenset(MLIR_ELEMENTS),
    ),
    # TensorRT reads ONNX: MXFP8 by operators of its own, FP4 weights by DequantizeLinear
    "tensorrt": Target(
        "tensorrt:to_tensorrt",
        ("trt.TRT_MXFP8DynamicQuantize", "trt.TRT_MXFP8DequantizeLinear", "DequantizeLinear"),
        {"fp8_e4m3": "float8e4m3fn", "fp4_e2m1": "float4e2m1"},
        frozenset({"fp8_e4m3"}),
        ("rceil",),
        ("even",),
    ),
}


def translate(model: GraphModule, target: str) -> GraphModule | str:
    """Write the MX operators of a converted model in the dialect of another compiler.

    Args:
        model: the result of `convert_pt2e`; it does not change.
        target: a key of `TARGETS`.

    Returns:
        A graph module whose other operators are the model's, for "torchao" and "circle". For the other targets text:
        one function for each linear layer of two quantized operands, without its bias, and for each other quantized
        tensor.

    Raises:
        MXError: for an unknown target, a model without quantized tensors, and a tensor that the dialect does not have.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.fx.targets.table import translate
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> config = pt2mx.get_default_mx_quantization_config("mxfp4", "mxfp8(rceil)")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config)))
        >>> "tosa.matmul_t_block_scaled" in translate(converted, "tosa")
        True
    """
    if not isinstance(target, str) or target not in TARGETS:
        raise MXError(f"unknown target {target!r}: {nearest(target, TARGETS)}")
    if not isinstance(model, GraphModule):
        raise MXError(f"expected a converted graph module, not {type(model).__name__}: pass what convert_pt2e returned")
    row, model = TARGETS[target], fold_all_weights(copy_sharing_tensors(model))
    pairs = pairs_of(model)
    if not pairs:
        raise MXError("the model has no quantized tensors: pass what convert_pt2e returned")
    for pair in pairs:
        _check(target, row, pair)
    return row.load()(model, row)


def _check(target: str, row: Target, pair: Pair) -> None:
    """Raise an MXError for a tensor that the dialect does not have."""
    spec, size = pair.spec, pair.shape[pair.spec.axis]
    kind = "weights" if pair.is_weight else "activations"
    elements = sorted(row.elements if pair.is_weight else row.activations)
    if not elements:
        _refuse(target, pair, f"has no operator for {kind}: quantize weights only (activation=None)")
    if spec.element.name not in elements or not spec.scale_format.is_power_of_two or spec.block_rows > 1:
        _refuse(target, pair, f"has {kind} of {', '.join(elements)} with E8M0 scales of one row")
    if row.block_sizes and spec.block_size not in row.block_sizes:
        _refuse(target, pair, f"has blocks of {', '.join(map(str, row.block_sizes))}")
    if not row.any_axis and spec.axis != len(pair.shape) - 1:
        _refuse(target, pair, "has blocks along the last dimension only")
    if row.whole_blocks and (isinstance(size, str) or size % spec.block_size):
        _refuse(target, pair, f"has whole blocks only, and {size} is no multiple of {spec.block_size}")
    if row.matrices and len(pair.shape) != 2:
        _refuse(target, pair, f"has matrices only, and this is of shape {pair.shape}")
    if not pair.is_weight:
        for name, allowed in (("scale_mode", row.scale_modes), ("rounding", row.roundings)):
            if allowed and getattr(spec, name) not in allowed:
                _refuse(target, pair, f"quantizes by {name} {' or '.join(allowed)}")


def _refuse(target: str, pair: Pair, reason: str) -> None:
    raise MXError(f"{pair.name} is in {pair.spec}, and the target {target!r} {reason}")
