"""AMD Quark's nodes: the target "quark" writes them instead of ours, `onnx_functions` adds functions to Quark's files.

Stock onnxruntime runs the functions. If Quark's library of custom operators is registered, its kernels run instead.
Weights stay packed in front of `DequantizeMX`. Quark stores float weights in front of its nodes, up to eight times as
large; its nodes would not change weights that are already quantized.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pt2mx.errors import MXError
from pt2mx.formats import FORMATS
from pt2mx.pt2e.files.output import check_output
from pt2mx.pt2e.onnx.files import import_domain, onnx, opset_of, raise_opset, read_model, tensor_types, write_model
from pt2mx.pt2e.onnx.function_bodies import add_bodies, fake_quantize
from pt2mx.pt2e.onnx.nodes import DOMAIN, FakeQuantizeMX, graphs_in, node_attributes
from pt2mx.quark import attributes as quark
from pt2mx.spec import MXSpec

#: the names of Quark's operator, the newer first, and their domains
OPERATORS = {"MXQuantizeDequantize": "com.amd.quark", "MXFixNeuron": "com.vai.quantize"}
#: rounding modes of integers, first the mode of Quark's ready-made configs
_ROUNDING_MODES = (2, 0, 1)
_DEFAULTS = tuple(quark.MX_OP_DEFAULT_ATTRS.items())


def onnx_functions(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> int:
    """Add functions for the MX nodes of AMD Quark to an ONNX file, so that stock onnxruntime runs it.

    The nodes are `MXQuantizeDequantize` of the domain com.amd.quark and `MXFixNeuron` of com.vai.quantize. Their
    functions, of standard operators, compute `pt2mx.quark.mx_quantize_dequantize` to the bit. Where Quark's library of
    custom operators is registered, its kernels run instead. A node that has a function keeps it.

    Args:
        path: the path of the file. A file of an opset below 18 is converted to 18.
        output: the path of the file to write; by default it replaces `path`.

    Returns:
        The number of MX nodes.

    Example:
        >>> import tempfile, numpy, onnx, onnxruntime, pt2mx
        >>> graph = onnx.parser.parse_graph('''
        ...     net (float[N, 4] x) => (float[N, 4] y) {
        ...         y = com.amd.quark.MXQuantizeDequantize <element_dtype = "fp4_e2m1"> (x)
        ...     }''')
        >>> imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.amd.quark", 1)]
        >>> model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     onnx.save(model, f"{folder}/net.onnx")
        ...     nodes = pt2mx.onnx_functions(f"{folder}/net.onnx")
        ...     session = onnxruntime.InferenceSession(f"{folder}/net.onnx")
        >>> nodes, session.run(None, {"x": numpy.float32([[1.0, 2.9, -5.9, 0.3]])})[0].tolist()
        (1, [[1.0, 3.0, -6.0, 0.5]])
    """
    output = path if output is None else output
    check_output(output)
    model = raise_opset(read_model(path))
    count = sum(1 for _ in quark_nodes(model))
    if not count:
        raise MXError(f"{os.fspath(path)!r} holds no MX node of Quark: {', '.join(OPERATORS)}")
    for graph in graphs_in(model.graph):
        for node in graph.node:
            if node.domain in OPERATORS.values() and node.op_type not in OPERATORS:
                raise MXError(f"{node.op_type} {node.name!r} is no MX node: there is no body for it here")
    write_model(add_quark_functions(model), output)
    return count


def to_quark(model: Any) -> Any:
    """Replace each `FakeQuantizeMX` of a model by Quark's node, add functions for all nodes, and return the model."""
    op_type, domain = next(iter(OPERATORS.items()))
    for node, ours in FakeQuantizeMX.nodes_in(model):
        attributes = attributes_of(ours.spec)
        if attributes is None:
            raise MXError(
                f"{node.name}: Quark has no node of {ours.spec}: it has the six OCP elements with scale mode floor, "
                "floats rounded to even, and integers that reach -128 (int8_full)"
            )
        node.CopyFrom(onnx.helper.make_node(op_type, node.input, node.output, node.name, domain=domain, **attributes))
    kept = [f for f in model.functions if f.domain != DOMAIN or not f.name.startswith(FakeQuantizeMX.op_type)]
    del model.functions[:]
    model.functions.extend(kept)
    return add_quark_functions(add_bodies(model))


def attributes_of(spec: MXSpec) -> dict[str, Any] | None:
    """Return the attributes of Quark's node for a spec; None where Quark has no such node."""
    element = spec.element.name.removesuffix("_full")
    for mode in _ROUNDING_MODES if element in FORMATS else ():
        attributes = {
            "element_dtype": element, "axis": spec.axis, "block_size": spec.block_size, "rounding_mode": mode,
        }  # fmt: skip
        if quark.mx_spec(attributes) == spec:
            return attributes
    return None


def quark_nodes(model: Any) -> Iterator[Any]:
    """Yield the nodes of Quark's operator in a model, including its subgraphs."""
    for graph in graphs_in(model.graph):
        yield from filter(is_quark, graph.node)


def is_quark(node: Any) -> bool:
    """Return whether a node calls Quark's operator."""
    return OPERATORS.get(node.op_type) == node.domain


def add_quark_functions(model: Any) -> Any:
    """Add a function for each spec among Quark's nodes in a model that have none, and return the model.

    The nodes of the most frequent spec are not changed; the `overload` of the others names their function.

    Raises:
        MXError: for attributes that Quark's operator does not have; the error names the node.
    """
    types = tensor_types(model, is_quark)
    ranks = {name: len(known.shape) for name, known in types.items() if known.shape is not None}
    functions = {(f.domain, f.name, f.overload) for f in model.functions}
    bare = [node for node in quark_nodes(model) if (node.domain, node.op_type, node.overload) not in functions]
    opset = opset_of(model)
    for op_type, domain in OPERATORS.items():
        specs = [(node, _spec(node, ranks)) for node in bare if node.op_type == op_type]
        counts = Counter(spec for _, spec in specs)
        overloads: dict[MXSpec, str] = {}
        for spec, _ in counts.most_common():
            function = fake_quantize(spec, opset)
            if overloads:
                function.overload = function.name.partition(".")[2]
            overloads[spec] = function.overload
            function.domain, function.name = domain, op_type
            del function.attribute[:]
            function.attribute_proto.extend(onnx.helper.make_attribute(*item) for item in _DEFAULTS)
            model.functions.append(function)
        for node, spec in specs:
            if overloads[spec]:
                node.overload = overloads[spec]
        if counts:
            import_domain(model, domain, 1)
    return model


def _spec(node: Any, ranks: dict[str, int]) -> MXSpec:
    """Return the spec of a node; its axis is -1 or counted from the front, -1 for a vector."""
    if len(node.input) != 1:
        raise MXError(f"{node.op_type} {node.name!r} has {len(node.input)} inputs, and Quark's operator one")
    try:
        spec, rank = quark.mx_spec(node_attributes(node)), ranks.get(node.input[0])
    except MXError as error:
        raise MXError(f"{node.op_type} {node.name!r}: {error}") from None
    axis = spec.axis
    if rank is None:
        if axis < -1:
            raise MXError(
                f"{node.op_type} {node.name!r}: axis={axis} of a tensor of unknown rank; count from the front"
            )
    elif rank == 1:
        axis = -1
    elif not -rank <= axis < rank:
        raise MXError(f"{node.op_type} {node.name!r}: axis={axis} is out of range for a tensor of rank {rank}")
    elif axis < -1:
        axis += rank
    return spec.replace(axis=axis)
