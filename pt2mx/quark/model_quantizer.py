"""Quark's `ModelQuantizer`, over `pt2mx.quantize_onnx`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pt2mx.errors import MXError
from pt2mx.quark.config import Config, QuantizationConfig

if TYPE_CHECKING:
    from onnx import ModelProto


class ModelQuantizer:
    """Quantize float ONNX models, file to file or in memory (extra `onnx`), with the interface of Quark's class.

    Quark's nodes quantize activations. Each has a function body of standard operators, so that stock onnxruntime runs
    the file without Quark's library. Weights are stored packed. Like `pt2mx.quantize_onnx`, the class quantizes the
    operands of matmuls, convolutions, recurrent layers and embeddings; Quark also quantizes biases and the outputs of
    other nodes.

    Raises:
        MXError: for another config than `Config(QuantizationConfig(...))`, and one that pt2mx does not support.
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
        """Quantize a model or a file. Return the quantized model if `model_output` is None, else None.

        Batches of a `calibration_data_reader` are only used to compare the outputs of both models (`report.fidelity`),
        because scales depend on each block alone.

        Raises:
            MXError: as `pt2mx.quantize_onnx`; for an argument or a field of the config that pt2mx does not support.
        """
        if calibration_data_path is not None:
            raise MXError(f"calibration_data_path={calibration_data_path!r} is not honoured: give a reader of batches")
        if algorithms:
            raise MXError(f"algorithms={algorithms!r} are not honoured: pt2mx.optimize does such on the torch model")
        batches = None if calibration_data_reader is None else _batches(calibration_data_reader)
        from pt2mx.quark.quantize_model import quantize_model

        model, self.report = quantize_model(model_input, model_output, self.config, batches)
        return model


def _batches(reader: object) -> Iterator[Mapping[str, np.ndarray]]:
    get_next = getattr(reader, "get_next", None)
    if not callable(get_next):
        raise MXError(f"a calibration_data_reader has a method get_next, which {reader!r} has not")
    return iter(lambda: get_next() or None, None)  # Quark takes an empty batch for the end, too
