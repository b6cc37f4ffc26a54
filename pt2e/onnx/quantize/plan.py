"""Plan the quantization of an ONNX file: the settings of each node, and the spec of each operand or the reason why it
has none."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from pt2mx.errors import MXError
from pt2mx.fx.graph.source_node import plain_name
from pt2mx.pt2e.onnx.quantize.graph import FloatGraph, Source
from pt2mx.pt2e.onnx.quantize.operators import ATEN, block_axis, operands_of
from pt2mx.pt2e.quantizer.annotate import REMARK
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import OPERANDS, Operand
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.recipe import ALGORITHMS, KV_CACHE, ORDER, SMALL_WEIGHTS
from pt2mx.pt2e.quantizer.settings import Choice, Site
from pt2mx.quark import attributes as quark
from pt2mx.spec import MXSpec

#: data types that MX formats can replace
HIGH_PRECISION = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
#: kinds of settings that a file gives no meaning to
_UNSUPPORTED = (ALGORITHMS, KV_CACHE, ORDER, SMALL_WEIGHTS)
_FLOATS = (*HIGH_PRECISION, TensorProto.DOUBLE)


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantized operand: its tensor, the constant behind it, and its spec. The axis counts the dimensions of the
    constant, or of a computed tensor."""

    operand: Operand
    tensor: str
    role: str
    spec: MXSpec
    source: Source | None


@dataclass(frozen=True)
class NodePlan:
    """The plan of a node: its quantized operands, the spec of its output, the reason why operands are not quantized, a
    remark."""

    node: NodeProto
    module: str
    operands: tuple[QuantizedOperand, ...] = ()
    output: MXSpec | None = None
    reasons: tuple[str, ...] = ()
    remark: str | None = None

    def __bool__(self) -> bool:
        """Return whether anything is quantized."""
        return bool(self.operands) or self.output is not None


def quantizer_of(config: object) -> MXQuantizer:
    """Return the quantizer for a config, as `quantize_onnx` takes it."""
    if isinstance(config, Mapping):
        spec = quark.mx_spec(config)
        config = MXQuantizationConfig(activation=spec, weight=spec)
    if isinstance(config, MXQuantizationConfig):
        config = MXQuantizer().set_global(config)
    if isinstance(config, str | os.PathLike):
        config = MXQuantizer.from_recipe(config)
    if not isinstance(config, MXQuantizer):
        raise MXError(
            f"config must be an MXQuantizer, an MXQuantizationConfig, the name or file of a recipe, or Quark's "
            f"dictionary of {', '.join(quark.MX_OP_DEFAULT_ATTRS)}, not {config!r}"
        )
    return config


def plan(graph: FloatGraph, quantizer: MXQuantizer) -> list[NodePlan]:
    """Plan each node that can be quantized, in the order of execution. Warn of settings that select no node."""
    for kind in quantizer.kinds:
        if kind in _UNSUPPORTED:
            raise MXError(f"{kind} is not for ONNX files: take it out of the settings, or quantize the torch model")
    layers = [node for node in graph.graph.node if operands_of(node) and _is_layer(graph, node)]
    sites = {position: site_of(node) for position, node in enumerate(layers)}  # nodes cannot be keys

    def planned(position: int, choice: Choice) -> NodePlan:
        return _planned(graph, layers[position], sites[position], choice)

    return list(quantizer.plan(sites, sites, planned).values())


def _is_layer(graph: FloatGraph, node: NodeProto) -> bool:
    """Return False for a Gather from anything but a constant matrix of floats: it is no embedding."""
    source = graph.source(node.input[0]) if node.op_type == "Gather" else None
    if source is None:
        return node.op_type != "Gather"
    return not source.chain and len(source.constant.dims) == 2 and source.constant.data_type in _FLOATS


def _planned(graph: FloatGraph, node: NodeProto, site: Site, choice: Choice) -> NodePlan:
    module, config = _module_of(site), choice.config
    if config is None:
        return NodePlan(node, module, reasons=(choice.reason,))
    operands: list[QuantizedOperand] = []
    reasons: list[str] = []
    remarks: list[str] = []
    for operand in operands_of(node):
        tensor = node.input[operand.position]
        source = graph.source(tensor)
        role = operand.role if operand.role != "operand" else "activation" if source is None else "weight"
        spec = config.spec_of(operand.name, role)
        if spec is None:
            continue
        if unfit := _unfit(graph, tensor, source, node, operand):
            reasons.append(unfit)
            continue
        axis = block_axis(node, operand, graph.shape(tensor) or ())
        if _is_value(graph, node, operand, source):
            axis = {-1: -2, -2: -1}[axis] if config.value_blocks == "head_dim" else axis
            remarks += [REMARK] * (config.value_blocks == "key_length")
        if axis < -1 and source is None and graph.shape(tensor) is None:
            reasons.append(f"{tensor} has an unknown rank")
            continue
        if tensor in graph.defaults:
            remarks.append(f"{tensor} is a default of an input, no constant: it is quantized at each call")
        operands.append(QuantizedOperand(operand, tensor, role, _along(graph, spec, axis, tensor, source), source))
    first = node.output[0]  # empty if the hidden states of a recurrent layer have no user
    output = config.output if first and _dtype(graph, first, node) in HIGH_PRECISION else None
    if not (operands or output or reasons):
        reasons.append("the config names no spec for its operands")
    output = None if output is None else output.replace(axis=-1)
    remark = "; ".join(dict.fromkeys(remarks)) if operands else None
    return NodePlan(node, module, tuple(operands), output, tuple(dict.fromkeys(reasons)), remark or None)


def _module_of(site: Site) -> str:
    """Return the innermost module of the torch model around a node, if the file records it."""
    innermost = ""
    for name, kind in zip(site.path, site.module_types, strict=True):
        if name and kind not in ATEN:
            innermost = name
    return innermost


def _is_value(graph: FloatGraph, node: NodeProto, operand: Operand, source: Source | None) -> bool:
    """Return whether an operand is the computed value of an attention, the other factor of its probabilities."""
    if node.op_type != "MatMul" or source is not None or len(graph.shape(node.input[operand.position]) or (1, 1)) < 2:
        return False
    other = node.input[1 - operand.position]
    return graph.is_probabilities(other) and not graph.is_probabilities(node.input[operand.position])


def _along(graph: FloatGraph, spec: MXSpec, axis: int, tensor: str, source: Source | None) -> MXSpec:
    """Return the spec with its axis, counted from the front for a constant and for a tensor of known rank.

    The second factor of a matmul may be a vector, which is reduced along its only dimension.
    """
    if source is not None:
        return spec.replace(axis=source.axis(axis))
    shape = graph.shape(tensor)
    return spec.replace(axis=axis if shape is None else max(axis, -len(shape)) % len(shape))


def _dtype(graph: FloatGraph, tensor: str, node: NodeProto) -> int | None:
    """Return the data type of an input or output of a node.

    The type is unknown after an operator of another domain. The function then returns the type of the node's constant
    operand.
    """
    dtype = graph.dtype(tensor)
    for name in node.input:
        source = graph.source(name)
        if not dtype and source is not None:
            dtype = source.constant.data_type
    return dtype


def _unfit(graph: FloatGraph, tensor: str, source: Source | None, node: NodeProto, operand: Operand) -> str | None:
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


def site_of(node: NodeProto) -> Site:
    """Return the site of a node of ONNX.

    A setting selects a node by the node's name, also with "." instead of "/", by the scopes that torch.onnx.export
    records in it, and by the module in a weight's name: `conv1` selects the user of `conv1.weight`. A type is an ONNX
    operator ("Conv") or a class that the exporter records.
    """
    recorded = {prop.key.rpartition(".")[2]: prop.value for prop in node.metadata_props}
    scopes, classes = _list(recorded.get("name_scopes")), _list(recorded.get("class_hierarchy"))
    modules = list(zip(scopes, classes, strict=False))[:-1]  # the last one is the operator
    modules += [(name.rpartition(".")[0], "") for name in node.input if "." in name]
    dotted = node.name.strip("/").replace("/", ".")
    modules += [(name, node.op_type) for name in dict.fromkeys((dotted, node.name))]
    operator = classes[-1].removesuffix(".default") if classes else ""
    return Site(
        operator=operator if operator in OPERANDS else ATEN[node.op_type],
        path=tuple(plain_name(name) for name, _ in modules),
        module_types=tuple(kind for _, kind in modules),
        call=node,
    )


def _list(text: str | None) -> list[str]:
    try:
        items = ast.literal_eval(text or "[]")
    except (SyntaxError, ValueError):
        return []
    return [str(item) for item in items] if isinstance(items, list) else []
