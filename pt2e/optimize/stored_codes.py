"""Replace rounded weights by codes and scales, where scales do not follow from the rounded values.

Quantizing values on a grid of powers of two again gives the same values. Scales with a significand follow from the
largest value of a block and of the tensor, which rounding changes; so the graph dequantizes such a weight already, and
`prepare_pt2e` leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.algorithms.block_scales import BlockScales, nearest_scales
from pt2mx.functional import tensor_scale_mx
from pt2mx.fx.graph.node import Dequantize, register_buffer, set_value
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS, ROUNDED_KEY, SPEC_KEY
from pt2mx.kernels.packing import is_packed
from pt2mx.pt2e.observe.observer import ROUNDING_KEY, STATISTICS_KEY
from pt2mx.pt2e.optimize.targets import WeightTarget, note_rounding, reason_not_rounded, set_weight


def pack_weights(model: GraphModule, targets: list[WeightTarget], scales: Mapping[Node, BlockScales]) -> None:
    """Replace the weights that have `scales`, by their first consumer, by `dequantize_mx` of buffers, named as by
    `fold_weights`. Changes `model`."""
    for target in targets:
        known = scales.get(target.consumers[0].node)
        if known is not None:
            packed = _dequantize(model, target, known)
            for node in target.equal:
                node.replace_all_uses_with(packed)


def round_siblings(model: GraphModule, targets: list[WeightTarget], scales: dict[Node, BlockScales]) -> None:
    """Round to nearest the siblings of weights with known scales that have none, so that all keep one tensor scale.
    Changes `model`; `scales`, as in `pack_weights`, gets theirs."""
    for target in targets:
        first, known = target.consumers[0].node, _known_siblings(target, scales)
        if known and first not in scales and not reason_not_rounded(target):
            value, spec = target.value.detach(), target.consumers[0].spec
            scales[first] = nearest_scales(value, spec, known[0].tensor_scale)
            rounded = scales[first].round(value).to(value.dtype)
            note_rounding(target, rounded)
            set_weight(model, target, rounded)


def shared_tensor_scale(target: WeightTarget, scales: Mapping[Node, BlockScales]) -> Tensor | None:
    """Return the tensor scale that a weight shares, () float32: the scale of siblings that are rounded, or one that
    follows from all values. None: it has its own, if the format has one."""
    if known := _known_siblings(target, scales):
        return known[0].tensor_scale
    return None if target.amax is None else tensor_scale_mx(target.amax, target.consumers[0].spec)


def _known_siblings(target: WeightTarget, scales: Mapping[Node, BlockScales]) -> list[BlockScales]:
    return [scales[s.consumers[0].node] for s in target.siblings if s.consumers[0].node in scales]


def _dequantize(model: GraphModule, target: WeightTarget, scales: BlockScales) -> Node:
    value, spec = target.value.detach(), scales.spec
    parts: dict[str, Tensor] = {"data": scales.codes(value), "scale": scales.stored}
    if scales.tensor_scale is not None:
        parts["tensor_scale"] = scales.tensor_scale.clone()  # siblings have the same
    nodes = {}
    with model.graph.inserting_before(min(target.equal)):
        for name, part in parts.items():
            nodes[name] = model.graph.get_attr(register_buffer(model, f"{target.name}_{name}", part))
            nodes[name].meta["val"] = part
        length = value.shape[spec.axis] if is_packed(spec.element.bits) else None
        call = Dequantize(nodes["data"], nodes["scale"], spec, value.dtype, length, nodes.get("tensor_scale"))
        packed = model.graph.call_function(ops.dequantize_mx, call.args)
    packed.meta.update({key: target.node.meta[key] for key in PROVENANCE_KEYS if key in target.node.meta})
    if ROUNDING_KEY in target.node.meta:
        packed.meta[STATISTICS_KEY] = target.node.meta[ROUNDING_KEY]
    set_value(packed)
    packed.meta |= {SPEC_KEY: spec, ROUNDED_KEY: True}
    return packed
