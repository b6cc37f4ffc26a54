"""`export_onnx`: write a converted model to an ONNX file that any onnxruntime runs.

The file records the source node of each value in the float model, so that `compare_stages` can compare them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.extras import import_extra, without_log_warnings
from pt2mx.fx.graph.source_node import nodes_by_source
from pt2mx.pt2e.files.output import check_output
from pt2mx.pt2e.files.user_errors import one_line
from pt2mx.pt2e.onnx.exportable import exportable
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.program.sizes import dim_names, dynamic_sizes

if TYPE_CHECKING:
    from onnx import ModelProto

    from pt2mx.pt2e.language.language_model import LanguageModel

#: the opsets that the functions are written for, and that torch's exporter converts to
OPSETS = range(18, 26)
#: the targets: each has a function that rewrites the nodes of the domain `pt2mx` in a model
DIALECTS = ("pt2mx", "native", "quark", "standard", "openvino", "tensorrt")
#: key of a file's metadata: JSON, source node -> the name of its value
_SOURCE_NODES = "pt2mx.origins"
#: a symbol in the expression of a dimension
_SYMBOL = re.compile(r"\w+")


def export_onnx(
    model: GraphModule | ExportedProgram | LanguageModel,
    path: str | os.PathLike[str],
    example_inputs: object = None,
    dynamic_shapes: Any = None,
    *,
    opset: int | None = None,
    target: str = "pt2mx",
) -> int:
    """Write a converted model as an ONNX file, with its weights packed.

    Each quantized activation and each packed weight is one node. The file contains a function of standard operators for
    it, so that any onnxruntime runs the file and gives the bits of pt2mx's operators. A lookup decodes the rows of a
    packed embedding. The file replaces `path` when it is complete and has passed onnx's checker.

    Outputs have the names of their keys where the model returns a dictionary or the like, and dynamic dimensions the
    names of the `Dim`s in `dynamic_shapes`, also of a program that `save_program` wrote.

    The file of a `LanguageModel` is its decoder, with keys and values of the past as inputs, under the names of
    onnxruntime-genai. It reads prompts and single tokens, and computes in float32.

    Args:
        model: the result of `convert_pt2e`, its ExportedProgram, or a `LanguageModel`. It does not change.
        path: the path of the file; by custom its name ends in .onnx.
        example_inputs: a tuple of inputs, or a mapping of keyword inputs; by default the program's example inputs. A
            `LanguageModel` takes neither these nor dynamic shapes.
        dynamic_shapes: as `torch.export.export` takes them; by default the program's dynamic shapes, or none.
        opset: 18 to 25; by default the opset of torch's exporter.
        target: `"pt2mx"` for nodes of pt2mx's domain with functions, `"native"` for these with weights in ONNX's own
            types (opset 24: FLOAT4E2M1, FLOAT8E8M0 and the others), `"quark"` for AMD Quark's nodes with functions,
            `"standard"` for DequantizeLinear with native elements and scales, for runtimes that have them,
            `"openvino"` for operators that OpenVINO's CPU plugin has, `"tensorrt"` for TensorRT's nodes of MXFP8.

    Returns:
        The number of nodes for quantized activations and packed weights.

    Raises:
        MXError: for another model, target or opset, for inputs and dynamic shapes that the model does not take, for
            operations without ONNX form (directed and stochastic roundings of activations, the scale mode `mse`,
            buffers that the model writes, a quantized cache, states of recurrent layers), for a file above 2 GB, and
            for a path at which no file can be written.

    Example:
        >>> import tempfile, onnxruntime, torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nodes = pt2mx.export_onnx(converted, f"{folder}/net.onnx", (x,))
        ...     session = onnxruntime.InferenceSession(f"{folder}/net.onnx")
        >>> nodes
        2
        >>> (y,) = session.run(None, {"input": x.numpy()})
        >>> torch.allclose(torch.from_numpy(y), converted(x), atol=1e-6)
        True
    """
    import_extra("onnx", "onnx")
    from pt2mx.pt2e.onnx.files import write_model

    rewrite = rewriter_of(target)
    if opset is not None:
        check_integer("opset", opset, OPSETS[0], OPSETS[-1])
    check_output(path)
    if isinstance(getattr(model, "program", None), ExportedProgram):  # a LanguageModel, whose import takes seconds
        if example_inputs is not None or dynamic_shapes is not None:
            raise MXError("the file of a LanguageModel has inputs of its own: leave example_inputs and shapes out")
        from pt2mx.pt2e.onnx.decoder import decoder_of  # imports transformers

        decoder = decoder_of(model)
        if target == "openvino" and decoder.longest is not None:  # its lookups beyond the end are no errors
            raise MXError(
                f"the model has frequencies of RoPE for {decoder.longest} tokens, and OpenVINO would give wrong "
                'numbers for a longer text: give target="pt2mx", whose files are for onnxruntime'
            )
        program = exportable(decoder.graph, decoder.example, decoder.shapes)
        proto = _model(program, opset, input_names=decoder.inputs, output_names=decoder.outputs)
        decoder.name_dims(proto)
    else:
        program = exportable(model, example_inputs, dynamic_shapes)
        proto = _model(program, opset, output_names=_output_names(program))
        _name_dims(proto, program, model)
    count = sum(1 for kind in (FakeQuantizeMX, DequantizeMX) for _ in kind.nodes_in(proto))
    write_model(rewrite(proto), path)
    return count


def rewriter_of(target: object) -> Callable[[Any], Any]:
    """Return the function that rewrites the nodes of the domain `pt2mx` in a model, and returns the model."""
    if not isinstance(target, str) or target not in DIALECTS:
        raise MXError(f"unknown target {target!r}: {nearest(target, DIALECTS)}")
    from pt2mx.pt2e.onnx import function_bodies, native, openvino, quark, standard, tensorrt

    rewriters = {
        "pt2mx": function_bodies.add_bodies,
        "native": native.to_native,
        "quark": quark.to_quark,
        "standard": standard.to_standard,
        "openvino": openvino.to_openvino,
        "tensorrt": tensorrt.to_tensorrt,
    }
    return rewriters[target]


def source_nodes_of(model: ModelProto) -> dict[str, str]:
    """Return the value in a model of each source node in the float graph; empty if the file does not record it."""
    for prop in model.metadata_props:
        if prop.key == _SOURCE_NODES:
            return json.loads(prop.value)
    return {}


def _output_names(program: ExportedProgram) -> list[str]:
    """Return the names of the outputs: their keys in what the model returns, or the names of their nodes."""
    from pt2mx.pt2e.onnx.files import fresh_name

    used = {node.name for node in program.graph.nodes}
    names = []
    outputs = pytree.tree_unflatten(program.graph_signature.user_outputs, program.call_spec.out_spec)
    for path, node in pytree.tree_flatten_with_path(outputs)[0]:
        keys = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", "")))) for part in path]
        if node is not None:
            is_named = not all(isinstance(part, pytree.SequenceKey) for part in path)
            names.append(fresh_name("_".join(keys), used) if is_named else node)
    return names


def _name_dims(proto: ModelProto, program: ExportedProgram, model: object) -> None:
    """Give the dynamic dimensions of a file the names of the `Dim`s of its program, or of the model: the same sizes."""
    from pt2mx.pt2e.onnx.files import rename_dims

    names = dim_names(program)
    if isinstance(model, ExportedProgram):
        before, sizes = dim_names(model), {(i, dim): str(size) for i, dim, size in dynamic_sizes(model)}
        for i, dim, size in dynamic_sizes(program):
            if name := before.get(sizes.get((i, dim), "")):
                names[str(size)] = name
    rename_dims(proto, lambda text: _SYMBOL.sub(lambda symbol: names.get(symbol[0], symbol[0]), text))


def _model(program: ExportedProgram, opset: int | None, **names: Any) -> Any:
    """Return the `ModelProto` of a program, with nodes of the domain `pt2mx`."""
    from pt2mx.pt2e.onnx.translations import emit, translations

    with warnings.catch_warnings(), without_log_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of its own code
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                **names,
                custom_translation_table=translations(emit),
                verbose=False,
            )
        except Exception as error:  # such as an operator without a translation; pages of advice follow it
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise MXError(f"could not export the program to ONNX: {one_line(cause)}") from error
    if exported is None or exported.exported_program is None:
        raise MXError("torch.onnx.export returned no model")
    model = exported.model_proto
    # values have the names of the nodes of the graph
    values = {value: value for node in model.graph.node for value in node.output}
    outputs = filter(None, exported.exported_program.graph_signature.user_outputs)
    values |= zip(outputs, (value.name for value in model.graph.output), strict=False)
    nodes = nodes_by_source(exported.exported_program.graph)
    sources = {source: values[node.name] for source, node in nodes.items() if node.name in values}
    model.metadata_props.add(key=_SOURCE_NODES, value=json.dumps(sources))
    return model
