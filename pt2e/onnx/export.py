"""`export_onnx`: a converted model in an ONNX file that any onnxruntime runs."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.extras import import_extra, without_log_warnings
from pt2mx.pt2e.onnx.exportable import exportable
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.origins import note_origins
from pt2mx.pt2e.onnx.targets import rewriter_of
from pt2mx.pt2e.output import check_output
from pt2mx.pt2e.user_errors import one_line

#: for which the bodies are written, and to which torch's exporter converts
OPSETS = range(18, 26)


def export_onnx(
    model: GraphModule | ExportedProgram,
    path: str | os.PathLike[str],
    example_inputs: object = None,
    dynamic_shapes: Any = None,
    *,
    opset: int | None = None,
    target: str = "pt2mx",
) -> int:
    """Write a converted model as an ONNX file, with its weights packed.

    A quantized activation and a packed weight are one node each, whose body is a function of standard operators in the
    file: any onnxruntime runs it, and gives the bits of pt2mx's operators. Rows of packed embeddings are decoded as
    they are looked up. The file takes the place of `path` when it is whole and onnx's checker has passed it.

    Args:
        model: what `convert_pt2e` returned, or an ExportedProgram of it. It stays unchanged.
        path: of the file; by custom its name ends in .onnx.
        example_inputs: a tuple of inputs, or a mapping of keyword inputs; those of a program are known.
        dynamic_shapes: as `torch.export.export` takes them; by default those of a program, or none.
        opset: 18 to 25; by default that of torch's exporter.
        target: `"pt2mx"` for nodes of pt2mx's domain with bodies, `"quark"` for AMD Quark's nodes, with bodies too,
            `"standard"` for DequantizeLinear with E8M0 scales and native elements, where a runtime has them.

    Returns:
        The number of nodes that stand for quantized activations and packed weights.

    Raises:
        MXError: for another model, target or opset, for inputs and dynamic shapes that the model does not take, for
            what has no ONNX form (directed and stochastic roundings of activations, the scale mode `mse`, buffers that
            the model writes), for a file above 2 GB, and where no file can be written.

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
    rewrite = rewriter_of(target)
    if opset is not None and not (isinstance(opset, int) and opset in OPSETS):
        raise MXError(f"opset={opset!r} must be an integer from {OPSETS[0]} to {OPSETS[-1]}")
    check_output(path)
    made = _model(exportable(model, example_inputs, dynamic_shapes), opset)
    count = sum(1 for kind in (FakeQuantizeMX, DequantizeMX) for _ in kind.nodes_in(made))
    importlib.import_module("pt2mx.pt2e.onnx.files").write_model(rewrite(made), path)
    return count


def _model(program: ExportedProgram, opset: int | None) -> Any:
    """The `ModelProto` of a program, with nodes of the domain `pt2mx`."""
    module = importlib.import_module("pt2mx.pt2e.onnx.translations")
    with warnings.catch_warnings(), without_log_warnings():
        warnings.simplefilter("ignore")  # torch's exporter, of its own code
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                custom_translation_table=module.translations(module.emit),
                verbose=False,
            )
        except Exception as error:  # of an operator without a translation, below pages of advice
            raise MXError(f"could not export the program to ONNX: {one_line(_cause(error))}") from error
    if exported is None or exported.exported_program is None:
        raise MXError("torch.onnx.export returned no model")
    model = exported.model_proto
    note_origins(model, exported.exported_program.graph)
    return model


def _cause(error: BaseException) -> BaseException:
    """The first of the errors that led to one."""
    return error if error.__cause__ is None else _cause(error.__cause__)
