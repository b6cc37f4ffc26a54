"""Annotate one operator: put a config's specs on its operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import node_arg
from pt2mx.fx.graph.qdq import ROUNDED_KEY
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.observe.qspec import mx_qspec
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec, is_batchedtensor
from pt2mx.pt2e.quantizer.config import Config, MXQuantizationConfig
from pt2mx.pt2e.quantizer.graph_patterns import REMARK, Arguments, along_head_dim, default_exclusion
from pt2mx.pt2e.quantizer.matching import Choice
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, Operand, arguments_of, gather_of, role_of
from pt2mx.spec import MXSpec

#: meta key of an operator's node: why it, or one of its operands, stays in high precision
REASON_KEY = "mx_reason"

#: meta key of an operator's node: what the user should know about the way it is quantized
REMARK_KEY = "mx_remark"

#: the result of any operator, blocks along its last dimension
OUTPUT = Operand("output", -1, "output", -1)


@dataclass(frozen=True)
class Plan:
    """A config applied to one operator.

    Args:
        node: the operator.
        config: the config; None leaves the operator in high precision.
        inputs: (tensor, the node that uses it) -> role and spec.
        output: the spec of the result; None: high precision.
        reasons: why operands stay in high precision.
        remark: what the user should know about the way the operator is quantized.
    """

    node: Node
    config: Config
    inputs: dict[tuple[Node, Node], tuple[str, MXSpec]]
    output: MXSpec | None
    reasons: tuple[str, ...]
    remark: str | None = None

    def __bool__(self) -> bool:
        """Return True if anything is quantized."""
        return bool(self.inputs) or self.output is not None


def plan_choice(node: Node, choice: Choice, constants: set[Node]) -> Plan:
    """Apply what the settings say of a call of a quantizable operator, without annotating the graph.

    Args:
        node: the call.
        choice: what the settings say.
        constants: as in `plan_operator`.
    """
    arguments = arguments_of(node)
    reason = default_exclusion(node, arguments, constants) if choice.is_general else None
    if choice.config is None or reason is not None:
        return Plan(node, None, {}, None, (reason or choice.reason,))
    return plan_operator(node, choice.config, arguments, constants)


def plan_operator(node: Node, config: MXQuantizationConfig, arguments: Arguments, constants: set[Node]) -> Plan:
    """Apply `config` to a call of a quantizable operator, without annotating the graph.

    Args:
        node: the call.
        config: the config that a setting selected.
        arguments: the operands of the call with their arguments.
        constants: the constant nodes of the graph; they get the specs of weights.
    """
    inputs: dict[tuple[Node, Node], tuple[str, MXSpec]] = {}
    reasons: list[str] = []
    holds_codes = False
    by_head = along_head_dim(node, arguments, constants)
    remark = REMARK if by_head != arguments and config.value_blocks == "key_length" else None
    if not arguments:
        reasons.append("no matmul of two tensors: it reduces no dimension of both")
    chosen = by_head if config.value_blocks == "head_dim" else arguments
    for operand, argument in chosen:
        tensor, user, gather = argument, node, gather_of(argument, operand)
        if gather is not None and node_arg(gather) in constants and Q_ANNOTATION_KEY not in gather.meta:
            tensor, user = node_arg(gather), gather
        if tensor is None:
            continue
        if ROUNDED_KEY in tensor.meta:
            holds_codes = True
            continue
        role = role_of(operand, tensor, constants)
        spec = config.spec_of(operand.name, role)
        if spec is None:
            continue
        reason = reason_unfit(tensor.name, tensor.meta.get("val"), node.name, operand, spec)
        if reason is not None:
            reasons.append(reason)
        else:
            inputs[tensor, user] = role, _along(spec, tensor, operand.axis)
    output = config.output
    if output is not None:
        is_unfit = reason_unfit(node.name, node.meta.get("val"), node.name, OUTPUT, output) is not None
        output = None if is_unfit else _along(output, node, OUTPUT.axis)
    if not (inputs or output or reasons or holds_codes):
        reasons.append("the config names no spec for its operands")
    return Plan(node, config, inputs, output, tuple(dict.fromkeys(reasons)), remark if inputs else None)


def annotate_operators(plans: Iterable[Plan]) -> None:
    """Annotate the graph as planned, and store in each operator's meta what is not quantized and the reason."""

    @functools.cache  # most operators of a model have the same specs
    def qspec(config: MXQuantizationConfig, role: str, spec: MXSpec) -> QuantizationSpec:
        tensor_scale = "dynamic" if role in ("weight", "bias") else config.tensor_scale
        return mx_qspec(spec, config.module_of(role), config.ste, tensor_scale)

    for plan in plans:
        if plan.config is not None:
            plan.node.meta[CONFIG_KEY] = plan.config
            _annotate_tensors(plan, functools.partial(qspec, plan.config))
        if plan.reasons:
            plan.node.meta[REASON_KEY] = "; ".join(plan.reasons)
        if plan.remark:
            plan.node.meta[REMARK_KEY] = plan.remark


def _annotate_tensors(plan: Plan, qspec: Callable[[str, MXSpec], QuantizationSpec]) -> None:
    """Annotate the nodes that use quantized tensors: the operator, or the gather in front of it."""
    by_user: dict[Node, dict] = {plan.node: {}} if plan.output else {}
    for (argument, user), (role, spec) in plan.inputs.items():
        by_user.setdefault(user, {})[argument] = qspec(role, spec)
    for user, inputs in by_user.items():
        output = qspec("output", plan.output) if plan.output and user is plan.node else None
        user.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            input_qspec_map=inputs, output_qspec=output, _annotated=True
        )


def _along(spec: MXSpec, tensor: Node, axis: int) -> MXSpec:
    """Return the spec with its axis counted from the front, so that equal specs compare equal.

    A 1-d second operand of a matmul is reduced along its only dimension.
    """
    rank = tensor.meta["val"].dim()
    return _with_axis(spec, max(axis, -rank) % rank)


@functools.cache
def _with_axis(spec: MXSpec, axis: int) -> MXSpec:
    return spec.replace(axis=axis)


def reason_unfit(name: str, value: object, consumer: str, operand: Operand, spec: MXSpec) -> str | None:
    """Return why a tensor cannot be quantized although a config names a spec for it; None if it can.

    Args:
        name: the name of the tensor.
        value: the tensor, real or fake.
        consumer: the name of the operator that uses it.
        operand: the operand that it is.
        spec: its spec.

    Raises:
        MXError: for a tensor in float64.
    """
    if not isinstance(value, torch.Tensor):
        return f"{name} is no tensor"
    if is_batchedtensor(value):
        return f"{name} is inside torch.vmap"
    if value.dtype == torch.float64:
        raise MXError(
            f"{consumer} computes in float64, which MX cannot represent: export the model in float32, float16 or "
            "bfloat16 (model.float()), or leave the operator out with set_module_name(..., None) or a filter"
        )
    if value.dtype not in HIGH_PRECISION:
        return f"{name} holds {str(value.dtype).removeprefix('torch.')}"
    if value.dim() == 0:
        return f"{name} is a scalar"
    axis = max(operand.axis, -value.dim())  # a vector is reduced along its only dimension
    if spec.block_rows > 1 and axis % value.dim() == 0 and value.dim() != 2:
        return f"{name} has no second dimension for blocks of {spec.block_rows} rows ({spec})"
    length = value.shape[axis]
    if operand.role == "operand" and isinstance(length, int) and length == 1:
        return "one value a block (an outer product, or a broadcast)"
    return None
