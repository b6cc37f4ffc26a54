"""The annotation of one operator: a config's specs on its operands."""

from __future__ import annotations

import torch
from torch.fx import Node

from pt2mx.checks import HIGH_PRECISION
from pt2mx.errors import MXError
from pt2mx.pt2e.config import MXQuantizationConfig
from pt2mx.pt2e.machinery import Q_ANNOTATION_KEY, QuantizationAnnotation
from pt2mx.pt2e.observer import MXFakeQuantize, MXObserver
from pt2mx.pt2e.operators import OPERATORS, operand_node, role_of
from pt2mx.pt2e.qspec import mx_qspec
from pt2mx.spec import MXSpec

#: meta key of an operator's node: why it, or an operand of it, was left in high precision
REASON_KEY = "mx_reason"

#: meta key of an operator's node: the config that a setting gave it
CONFIG_KEY = "mx_config"

_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.matmul.default})


def annotate_operator(node: Node, config: MXQuantizationConfig, constants: set[Node]) -> None:
    """Annotate a call of one of `OPERATORS` as `config` says, and note in its meta what was left alone and why.

    `constants` are the constant nodes of the graph: their specs are the weights'.
    """
    constructor = MXFakeQuantize if config.is_qat else config.observer or MXObserver
    node.meta[CONFIG_KEY] = config
    inputs, reasons = {}, []
    for operand in OPERATORS[node.target]:
        argument = operand_node(node, operand)
        spec = getattr(config, role_of(operand, argument, constants)) if argument is not None else None
        if spec is None:
            continue
        if reason := _unfit(argument, node, operand.axis):
            reasons.append(reason)
            continue
        inputs[argument] = mx_qspec(_along(spec, argument, operand.axis), constructor)
    output = None
    if config.output is not None and not _unfit(node, node, -1):
        output = mx_qspec(_along(config.output, node, -1), constructor)
    if inputs or output:
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            input_qspec_map=inputs, output_qspec=output, _annotated=True
        )
    else:
        reasons.append("the config names no spec for its operands")
    if reasons:
        node.meta[REASON_KEY] = "; ".join(dict.fromkeys(reasons))


def _along(spec: MXSpec, tensor: Node, axis: int) -> MXSpec:
    """The spec with its axis counted from the front, so that equal ones compare equal; a 1-d second operand of a matmul
    is reduced along its only dimension."""
    rank = tensor.meta["val"].dim()
    return spec.replace(axis=max(axis, -rank) % rank)


def _unfit(tensor: Node, consumer: Node, axis: int) -> str | None:
    """Why a tensor is left in high precision although a config names a spec for it."""
    value = tensor.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return f"{tensor.name} is no tensor"
    if value.dtype == torch.float64:
        raise MXError(
            f"{consumer.name} computes in float64, which MX cannot represent: export the model in float32, float16 or "
            "bfloat16 (model.float()), or leave the operator out with set_module_name(..., None) or a filter"
        )
    if value.dtype not in HIGH_PRECISION:
        return f"{tensor.name} holds {str(value.dtype).removeprefix('torch.')}"
    if value.dim() == 0:
        return f"{tensor.name} is a scalar"
    length = value.shape[max(axis, -value.dim())]
    if consumer.target in _PRODUCTS and isinstance(length, int) and length == 1:
        return "an outer product: the reduced dimension is 1"
    return None
