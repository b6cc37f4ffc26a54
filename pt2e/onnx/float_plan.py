"""The plan of a quantized ONNX file: the operands of each node that get a spec, and the reasons for the others."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto, TensorProto
from torch.fx import Graph, Node

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.float_graph import FloatGraph, Source
from pt2mx.pt2e.onnx.float_operators import ATEN, operands_of
from pt2mx.pt2e.onnx.float_settings import NodeSettings, stand_in
from pt2mx.pt2e.quantizer.attention import REMARK
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.matching import modules_of
from pt2mx.pt2e.quantizer.operators import Operand
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.spec import MXSpec

#: data types that MX formats stand for
HIGH_PRECISION = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_FLOATS = (*HIGH_PRECISION, TensorProto.DOUBLE)


@dataclass(frozen=True)
class QuantizedOperand:
    """One operand that is quantized: its tensor, the constant behind it, if it is one, and its spec, whose axis is that
    of the constant, or of the tensor."""

    operand: Operand
    tensor: str
    role: str
    spec: MXSpec
    source: Source | None


@dataclass(frozen=True)
class NodePlan:
    """One node: what is quantized, the spec of its output, why something was left alone, and what to know of it."""

    node: NodeProto
    module: str
    operands: tuple[QuantizedOperand, ...] = ()
    output: MXSpec | None = None
    reasons: tuple[str, ...] = ()
    remark: str | None = None

    def __bool__(self) -> bool:
        """True if anything is quantized."""
        return bool(self.operands) or self.output is not None


def plan(graph: FloatGraph, quantizer: MXQuantizer) -> list[NodePlan]:
    """Plan each node that can be quantized, in the order of execution. Warns of settings that mean no node.

    Raises:
        MXError: for a chosen node that computes in float64.
    """
    settings, places = NodeSettings(quantizer), Graph()
    nodes = {stand_in(node, places): node for node in graph.graph.node if operands_of(node) and _is_layer(graph, node)}
    plans: dict[Node, NodePlan] = {}
    for place, node in nodes.items():
        config, reason = settings.config_of(place)
        plans[place] = _planned(graph, node, place, config, reason)
    for place, (config, reason) in settings.at_the_ends([place for place, found in plans.items() if found]).items():
        plans[place] = _planned(graph, nodes[place], place, config, reason)
    settings.warn_unmatched()
    return list(plans.values())


def _is_layer(graph: FloatGraph, node: NodeProto) -> bool:
    """False for a gather from something else than a constant matrix of floats: it is no embedding."""
    source = graph.source(node.input[0]) if node.op_type == "Gather" else None
    if source is None:
        return node.op_type != "Gather"
    return not source.chain and len(source.constant.dims) == 2 and source.constant.data_type in _FLOATS


def _planned(
    graph: FloatGraph, node: NodeProto, place: Node, config: MXQuantizationConfig | None, reason: str
) -> NodePlan:
    module = _module_of(place)
    if config is None:
        return NodePlan(node, module, reasons=(reason,))
    found: list[QuantizedOperand] = []
    reasons: list[str] = []
    remarks: list[str] = []
    for operand in operands_of(node):
        tensor = node.input[operand.position]
        source = graph.source(tensor)
        role = operand.role if operand.role != "operand" else "activation" if source is None else "weight"
        spec = config.spec_of(operand.name, role)
        if spec is None:
            continue
        if why := _unfit(graph, tensor, source, node, operand):
            reasons.append(why)
            continue
        axis = operand.axis
        if _is_value(graph, node, operand, source):
            axis = {-1: -2, -2: -1}[axis] if config.value_blocks == "head_dim" else axis
            remarks += [REMARK] * (config.value_blocks == "key_length")
        if axis < -1 and source is None and graph.shape(tensor) is None:
            reasons.append(f"{tensor} has an unknown rank")
            continue
        if tensor in graph.defaults:
            remarks.append(f"{tensor} is a default of an input, no constant: it is quantized at each call")
        found.append(QuantizedOperand(operand, tensor, role, _along(graph, spec, axis, tensor, source), source))
    first = node.output[0]  # empty where a recurrent layer's hidden states are not read
    output = config.output if first and _dtype(graph, first, node) in HIGH_PRECISION else None
    if not (found or output or reasons):
        reasons.append("the config names no spec for its operands")
    whole = None if output is None else output.replace(axis=-1)
    remark = "; ".join(dict.fromkeys(remarks)) if found else None
    return NodePlan(node, module, tuple(found), whole, tuple(dict.fromkeys(reasons)), remark or None)


def _module_of(place: Node) -> str:
    """The innermost module of the torch model that a node came from, as far as the file says so."""
    names = [name for name, kind in modules_of(place) if name and kind not in ATEN]
    return names[-1] if names else ""


def _is_value(graph: FloatGraph, node: NodeProto, operand: Operand, source: Source | None) -> bool:
    """True of the computed factor that the probabilities of an attention are multiplied with."""
    if node.op_type != "MatMul" or source is not None or len(graph.shape(node.input[operand.position]) or (1, 1)) < 2:
        return False
    other = node.input[1 - operand.position]
    return graph.is_probabilities(other) and not graph.is_probabilities(node.input[operand.position])


def _along(graph: FloatGraph, spec: MXSpec, axis: int, tensor: str, source: Source | None) -> MXSpec:
    """The spec with its axis: of a constant counted from the front, as of a tensor whose rank is known; the second
    factor of a product, if it is a vector, is reduced along its only dimension."""
    if source is not None:
        return spec.replace(axis=source.axis(axis))
    shape = graph.shape(tensor)
    return spec.replace(axis=axis if shape is None else max(axis, -len(shape)) % len(shape))


def _dtype(graph: FloatGraph, tensor: str, node: NodeProto) -> int | None:
    """The data type of a tensor that a node reads or gives. Behind an operator of another domain it is unknown, and
    that of the constant beside it is taken."""
    constants = (source.constant for name in node.input if (source := graph.source(name)) is not None)
    return graph.dtype(tensor) or next((constant.data_type for constant in constants), None)


def _unfit(graph: FloatGraph, tensor: str, source: Source | None, node: NodeProto, operand: Operand) -> str | None:
    """The reason to leave a tensor as it is although a config names a spec for it; None: there is none."""
    if graph.is_dequantized(tensor):
        return f"{tensor} is quantized already, before a DequantizeLinear"
    dtype = _dtype(graph, tensor, node) if source is None else source.constant.data_type
    shape = graph.shape(tensor) if source is None else tuple(source.constant.dims)
    if dtype == TensorProto.DOUBLE:
        raise MXError(
            f"{node.op_type} {node.name!r} computes in float64, which MX cannot represent: export the model in "
            "float32, or leave the node out with set_module_name(name, None)"
        )
    if dtype is None:
        return f"{tensor} has an unknown type"
    if dtype not in HIGH_PRECISION:
        return f"{tensor} holds {TensorProto.DataType.Name(dtype).lower()}"
    if shape == ():
        return f"{tensor} is a scalar"
    if operand.role == "operand" and shape is not None:
        length = shape[max(operand.axis, -len(shape))]
        if length == 1:
            return "one value a block (an outer product, or a broadcast)"
    return None
