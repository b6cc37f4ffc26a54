"""Quark's `ModelQuantizer`, over `pt2mx.quantize_onnx`."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pt2mx.errors import MXError
from pt2mx.quark.config import Config, QuantizationConfig

if TYPE_CHECKING:
    from onnx import ModelProto
from pathlib import Path

from pt2mx.errors import nearest
from pt2mx.kernels.cpu.build import cache_folder, use_built

#: `pt2mx.quantize_onnx` belongs to the PT2E flow, so `quantize_model` imports it
_FLOW = "pt2mx.quark.quantize_model"


class ModelQuantizer:
    """Quantize float ONNX models, file to file or in memory (extra `onnx`), with the interface of Quark's class.

    Quark's nodes quantize activations. Each has a function body of standard operators, so that stock onnxruntime runs
    the file. Weights are stored packed. Like `pt2mx.quantize_onnx`, the class quantizes the operands of matmuls,
    convolutions, recurrent layers and embeddings; Quark also quantizes biases and the outputs of other nodes.

    Args:
        config: a `Config` with a `QuantizationConfig`.

    Raises:
        MXError: for another config, and one that pt2mx does not support.

    Example:
        >>> import tempfile, torch
        >>> from pt2mx import quark
        >>> config = quark.QuantizationConfig(quant_format=quark.VitisQuantFormat.MXFixNeuron, print_summary=False)
        >>> quantizer = quark.ModelQuantizer(quark.Config(config))
        >>> model, x = torch.nn.Linear(64, 64, bias=False).eval(), torch.ones(1, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.onnx.export(model, (x,), dynamo=True, verbose=False).save(f"{folder}/float.onnx")
        ...     quantizer.quantize_model(f"{folder}/float.onnx", f"{folder}/mx.onnx")
        >>> quantizer.report.bytes_before, quantizer.report.bytes_after
        (16384, 4224)
    """

    #: the report of the last model, an `OnnxReport`
    report: Any = None

    def __init__(self, config: Config) -> None:
        if not isinstance(config, Config) or not isinstance(config.global_quant_config, QuantizationConfig):
            raise MXError(
                "a ModelQuantizer takes Config(QuantizationConfig(...)), both of pt2mx.quark, not a "
                f"{type(getattr(config, 'global_quant_config', config)).__name__}"
            )
        config.global_quant_config.spec()
        self.config = config.global_quant_config

    def quantize_model(
        self,
        model_input: str | os.PathLike[str] | ModelProto,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: object = None,
        calibration_data_path: str | None = None,
        algorithms: list | None = None,
    ) -> ModelProto | None:
        """Quantize a model.

        Args:
            model_input: of the float model: the path of its file, or the model.
            model_output: the path of the quantized file, or None for the model in memory.
            calibration_data_reader: an object whose `get_next` returns a batch by the names of inputs, and None at the
                end. Batches are only used to compare the outputs of both models, because scales depend on each block
                alone.
            calibration_data_path: None; batches come from a reader.
            algorithms: none.

        Returns:
            The quantized model where `model_output` is None; else None.

        Raises:
            MXError: as `pt2mx.quantize_onnx`; for an argument or a field of the config that pt2mx does not support.
        """
        if calibration_data_path is not None:
            raise MXError(f"calibration_data_path={calibration_data_path!r} is not honoured: give a reader of batches")
        if algorithms:
            raise MXError(f"algorithms={algorithms!r} are not honoured: pt2mx.optimize does such on the torch model")
        batches = None if calibration_data_reader is None else _batches(calibration_data_reader)
        with _warnings_ignored(self.config.ignore_warnings):
            quantize = importlib.import_module(_FLOW).quantize_model
            model, self.report = quantize(model_input, model_output, self.config, batches)
        if self.config.print_summary:
            print(self.report.to_table())
            if self.report.fidelity is not None:
                print(f"against the float model: {self.report.fidelity}")
        return model


def _batches(reader: object) -> Iterator[Mapping[str, np.ndarray]]:
    get_next = getattr(reader, "get_next", None)
    if not callable(get_next):
        raise MXError(f"a calibration_data_reader has a method get_next, which {reader!r} has not")
    return iter(lambda: get_next() or None, None)  # Quark takes an empty batch for the end, too


@contextmanager
def _warnings_ignored(ignored: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        for kind in (ResourceWarning, UserWarning) if ignored else ():
            warnings.simplefilter("ignore", kind)
        yield


_SOURCE = Path(__file__).parent / "src" / "register.cpp"
_DEVICES = ("CPU", "CUDA", "ROCM")


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """Return a path for `SessionOptions.register_custom_ops_library`, as Quark's function of this name does.

    The library registers no operator. Stock onnxruntime runs the files of pt2mx with or without it, because they hold
    function bodies of standard operators. The first call builds the library in the cache of torch's extensions.

    Args:
        device: "CPU", "CUDA" or "ROCM".
        lib: "custom_ops".

    Returns:
        The path of the library.

    Raises:
        MXError: for another device or library, and if the library cannot be built or the cache cannot be written.

    Example:
        >>> import onnxruntime
        >>> from pt2mx import quark
        >>> onnxruntime.SessionOptions().register_custom_ops_library(quark.get_library_path("CPU"))
    """
    for name, value, allowed in (("device", device, _DEVICES), ("lib", lib, ("custom_ops",))):
        if not isinstance(value, str) or value.upper() not in map(str.upper, allowed):
            raise MXError(f"unknown {name} {value!r}: {nearest(value, allowed)}")
    try:
        path = use_built("quark", (str(_SOURCE),), (), lambda path: path)
    except (OSError, RuntimeError) as error:
        raise MXError(f"cannot build {_SOURCE.name}: install a C++ compiler, or name one in CXX ({error})") from None
    if not path.is_file():
        raise MXError(f"cannot keep the library in {str(cache_folder())!r}: name a folder in TORCH_EXTENSIONS_DIR")
    return str(path)
