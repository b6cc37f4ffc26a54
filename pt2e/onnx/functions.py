"""`onnx_functions`: bodies for the MX nodes of a file that another tool wrote."""

from __future__ import annotations

import os

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.files import read_model, write_model
from pt2mx.pt2e.onnx.nodes import graphs_in
from pt2mx.pt2e.onnx.opsets import raise_opset
from pt2mx.pt2e.onnx.quark import OPERATORS, add_quark_bodies, quark_nodes
from pt2mx.pt2e.output import check_output


def onnx_functions(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> int:
    """Add bodies to the MX nodes of AMD Quark in an ONNX file, so that stock onnxruntime runs it.

    The nodes are `MXQuantizeDequantize` of the domain com.amd.quark and `MXFixNeuron` of com.vai.quantize. Their
    functions, of standard operators, compute what `pt2mx.quark.mx_quantize_dequantize` does, to the bit. Where Quark's
    library of custom operators is registered, its kernels run in their place. A node that has a function keeps it.

    Args:
        path: of the file; of an opset below 18 it is converted to 18.
        output: of the file to write; by default `path`, whose place it takes.

    Returns:
        The number of MX nodes.

    Raises:
        MXError: for a file that is no ONNX model or cannot be converted, one without such nodes, attributes that
            Quark's operator does not have, nodes of Quark that are not MX and would not run, and where no file can be
            written.

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
    write_model(add_quark_bodies(model), output)
    return count
