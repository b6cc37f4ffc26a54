"""Annotate one operator: put a config's specs on its operands.

Attention values: by the dot product of the specification (OCP MX v1.0, section 6.1) blocks run along the dimension that
a matmul reduces, for values the key length. Then a block holds several tokens, and masked, padded and later tokens
influence its scale: in a causal model the last token would change the results of the first ones, and the old content of
a cache would change a new prompt. So by default the blocks of values run along the head dimension, within one token.

Three kinds of matmuls stay in high precision under the global setting; a more specific setting quantizes them, of
routers one that names a module.

Angles: random Fourier features (Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
Dimensional Domains", 2020) are the sine and cosine of coordinates times a constant matrix. An error of a few percent in
an angle of many turns gives a random result, and the matrix has only a few hundred values.

Factors of a weight: a matmul of constants that computes a weight (a low-rank update) runs at conversion. Quantizing its
factors too would add their noise, and save nothing.

Routers: a matmul whose result chooses the experts of a token has few values, and an error changes the choice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import is_view
from pt2mx.fx.graph.node import attribute_of, model_of, node_arg
from pt2mx.fx.graph.qdq import ROUNDED_KEY
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.observe.qspec import mx_qspec
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec, is_batchedtensor
from pt2mx.pt2e.quantizer.config import Config, MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import (
    CONFIG_KEY,
    OPERANDS,
    Operand,
    arguments_of,
    einsum_free_axis,
    gather_of,
    operator_name,
    role_of,
)
from pt2mx.pt2e.quantizer.settings import Choice
from pt2mx.spec import MXSpec

#: meta key of an operator's node: why it, or one of its operands, stays in high precision
REASON_KEY = "mx_reason"

#: meta key of an operator's node: what the user should know about the way it is quantized
REMARK_KEY = "mx_remark"

#: the result of any operator, blocks along its last dimension
OUTPUT = Operand("output", -1, "output", -1)

#: the operands of a call, each with its argument (`arguments_of`)
Arguments = list[tuple[Operand, Node | None]]

#: the remark of a report on values in blocks along the key length
REMARK = "value in blocks along the key length: masked, padded and later tokens change a block's scale"

#: the kinds of settings that name no module, and so no router
_ANY_MODULE = frozenset({"operator_type", "small_weights"})
#: why a router stays in high precision
ROUTER = "a router: it chooses the experts of a token"

_SOFTMAX = frozenset({
    "softmax", "_softmax", "special_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "special_log_softmax",
})  # fmt: skip
#: apart from views, operators after which probabilities are still probabilities: casts, copies, masks, top-k, dropout
_KEEPS_PROBABILITIES = frozenset({
    "_to_copy", "type_as", "clone", "dropout", "native_dropout", "feature_dropout", "alpha_dropout", "mul", "div",
    "where", "masked_fill", "nan_to_num", "copy", "lift_fresh_copy", "reshape", "cat", "constant_pad_nd", "pad",
    "tril", "triu", "topk", "exp", "scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "index_put",
    "index_fill", "masked_scatter",
})  # fmt: skip

#: most coordinates of a point: space and time, or the corners of a box
_COORDINATES = 4
#: apart from views, operators after which an angle is still one: casts, copies, scaling, shifting
_KEEPS_ANGLES = frozenset({
    "_to_copy", "type_as", "clone", "mul", "div", "add", "sub", "neg", "reshape", "cat", "stack",
})  # fmt: skip
_PERIODIC = frozenset({"sin", "cos"})


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


def plan_choice(node: Node, choice: Choice, constants: set[Node], routers: Container[Node]) -> Plan:
    """Apply what the settings say of a call of a quantizable operator, without annotating the graph.

    Args:
        node: the call.
        choice: what the settings say.
        constants: as in `plan_operator`.
        routers: the calls that choose experts.
    """
    arguments = arguments_of(node)
    reason = default_exclusion(node, arguments, constants) if choice.is_general else None
    if node in routers and all(kind in _ANY_MODULE for kind, _ in choice.matching):
        reason = ROUTER
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


def along_head_dim(node: Node, arguments: Arguments, constants: set[Node]) -> Arguments:
    """Return the operands of a call with their arguments, with the blocks of attention values along the head dimension.

    Attention values are the values of a fused attention, and the other factor of the probabilities in an unfused one.
    Constant factors keep their axis: they hold no tokens.
    """
    moved: Arguments = []
    for operand, argument in arguments:
        axis = _head_axis(node, operand, argument, arguments, constants)
        moved.append((operand if axis is None else dataclasses.replace(operand, axis=axis), argument))
    return moved


def _head_axis(
    node: Node, operand: Operand, argument: Node | None, arguments: Arguments, constants: set[Node]
) -> int | None:
    if operand.name == "value":
        return -1
    if operand.role != "operand" or argument is None or argument in constants:
        return None
    factors = [factor for other, factor in arguments if other.role == "operand" and other is not operand]
    if not any(factor is not None and _are_probabilities(factor) for factor in factors) or _are_probabilities(argument):
        return None
    if operand.item is not None:  # of an einsum, whose factors are a list
        return einsum_free_axis(node, operand.item)
    value = argument.meta.get("val")
    is_matrix = isinstance(value, torch.Tensor) and value.dim() > 1
    return {-1: -2, -2: -1}.get(operand.axis) if is_matrix else None


def _are_probabilities(node: Node) -> bool:
    """Return True for the result of a softmax, also after casts, masks, dropout and views."""
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        name = _packet_name(current)
        if name in _SOFTMAX:
            return True
        if name in _KEEPS_PROBABILITIES or is_view(current):
            pending.extend(current.all_input_nodes)
    return False


def default_exclusion(node: Node, arguments: Arguments, constants: set[Node]) -> str | None:
    """Return why the global setting leaves a matmul in high precision; None where it quantizes it.

    Args:
        node: a call of a quantizable operator.
        arguments: its operands with their arguments.
        constants: the constant nodes of the graph.
    """
    if not constants:
        return None
    factors = [operand for operand, argument in arguments if operand.role == "operand" and argument is not None]
    if factors and node in constants and _makes_weights(node, constants):
        return "a factor of a weight, which is quantized as a whole"
    for operand, argument in arguments:
        if argument is None or argument not in constants:
            continue
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        length = value.shape[max(operand.axis, -value.dim())]
        if isinstance(length, int) and length <= _COORDINATES and (operand.role == "operand" or _is_buffer(argument)):
            if _read_by(node) >= _PERIODIC:
                return f"angles: sine and cosine use the matmul with the constant {argument.name}"
    return None


def _is_buffer(node: Node) -> bool:
    """Return True for a tensor of the model that training does not change."""
    return node.op == "get_attr" and not isinstance(attribute_of(model_of(node.graph), node), torch.nn.Parameter)


def _makes_weights(node: Node, constants: set[Node]) -> bool:
    """Return True if a constant, and what is computed from it alone, is used by quantizable operators only."""
    return bool(node.users) and all(
        _makes_weights(user, constants) if user in constants else operator_name(user.target) in OPERANDS
        for user in node.users
    )


def _read_by(node: Node) -> set[str]:
    """Return the names of the operators that use a value, directly or after scaling, shifting and views."""
    seen, pending, names = {node}, [node], set()
    while pending:
        for user in pending.pop().users:
            name = _packet_name(user)
            names.add(name)
            if user not in seen and (name in _KEEPS_ANGLES or is_view(user)):
                seen.add(user)
                pending.append(user)
    return names


def _packet_name(node: Node) -> str:
    """Return the name of an operator without namespace and overload."""
    return getattr(getattr(node.target, "_overloadpacket", node.target), "__name__", "")
