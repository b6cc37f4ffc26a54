"""The table of targets, and `translate`: write a converted model with the MX operators of another compiler.

A target is a row of `TARGETS`: its function, and the formats that the compiler has, so that `translate` refuses others
before the function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from pt2mx.errors import MXError, nearest
from pt2mx.formats import FORMATS
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import is_ours
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.targets.circle import to_circle
from pt2mx.fx.targets.pairs import Pair, pairs_of
from pt2mx.fx.targets.torchao import to_torchao
from pt2mx.fx.targets.tosa_mxfp import NAMES, to_tosa_mxfp


@dataclass(frozen=True)
class Target:
    """A compiler with MX operators.

    Args:
        write: (model, its quantized tensors, `elements`) -> the model, changed to the compiler's operators.
        elements: element format -> its name there.
        activations: the elements of activations; empty if there is no operator that quantizes.
        scale_modes, roundings: scale modes and roundings that its quantizing operator computes; empty for any.
        block_sizes: the sizes of a block; empty for any.
        any_axis: False if blocks run along the last dimension only.
        whole_blocks: True if the size along the axis must be a multiple of the block size.
        matrices: True if tensors have two dimensions.
    """

    write: Callable[[GraphModule, Sequence[Pair], Mapping[str, str]], GraphModule]
    elements: Mapping[str, str]
    activations: frozenset[str] = frozenset()
    scale_modes: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = (32,)
    any_axis: bool = False
    whole_blocks: bool = True
    matrices: bool = False


TARGETS: dict[str, Target] = {
    # ExecuTorch's `executorch.extension.llm.export.mx`; its MLX backend reads the operator
    "torchao": Target(
        to_torchao,
        {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"},
        block_sizes=(),
        matrices=True,
    ),
    # Samsung's TICO, for Circle files of ONE: the formulas of microxcaling, round="nearest" is half away from zero
    "circle": Target(
        to_circle,
        {**{name: name for name in FORMATS}, "fp4_e2m1": "fp4"},
        frozenset(FORMATS),
        ("floor",),
        ("half_away",),
        any_axis=True,
        whole_blocks=False,
    ),
    # ExecuTorch's `to_mxfp`, for its Arm backend
    "tosa_mxfp": Target(to_tosa_mxfp, NAMES, frozenset(NAMES), roundings=("even",), any_axis=True, whole_blocks=False),
}


def translate(model: GraphModule, target: str) -> GraphModule:
    """Write a converted model with the MX operators of another compiler.

    Args:
        model: the result of `convert_pt2e`; it does not change.
        target: a key of `TARGETS`.

    Returns:
        A graph module whose other operators are the model's.

    Raises:
        MXError: for an unknown target, a model without quantized tensors, one with some in a subgraph, and a tensor
            that the compiler does not have.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.fx.targets.table import translate
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> config = pt2mx.get_default_mx_quantization_config("mxfp8", None)
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config)))
        >>> "torchao.dequantize_mx" in translate(converted, "torchao").code
        True
    """
    if not isinstance(target, str) or target not in TARGETS:
        raise MXError(f"unknown target {target!r}: {nearest(target, TARGETS)}")
    if not isinstance(model, GraphModule):
        raise MXError(f"expected a converted graph module, not {type(model).__name__}: pass what convert_pt2e returned")
    row = TARGETS[target]
    model = fold_all_weights(copy_sharing_tensors(model))
    for graph in graph_modules(model)[:-1]:
        for node in filter(is_ours, graph.graph.nodes):
            raise MXError(
                f"{node.target} of {module_name(node) or node.name!r} is in a subgraph (cond, no_grad), and translate "
                "writes none: leave the module in float, or call it outside of the subgraph"
            )
    pairs = pairs_of(model)
    if not pairs:
        raise MXError("the model has no quantized tensors: pass what convert_pt2e returned")
    for pair in pairs:
        _check(target, row, pair)
    return row.write(model, pairs, row.elements)


def _check(target: str, row: Target, pair: Pair) -> None:
    """Raise an MXError for a tensor that the compiler does not have."""
    spec, size = pair.spec, pair.shape[pair.spec.axis]
    kind = "weights" if pair.is_weight else "activations"
    elements = sorted(row.elements if pair.is_weight else row.activations)
    if not elements:
        _refuse(target, pair, f"has no operator for {kind}: quantize weights only (activation=None)")
    if spec.element.name not in elements or not spec.has_power_of_two_scale or spec.block_rows > 1:
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
