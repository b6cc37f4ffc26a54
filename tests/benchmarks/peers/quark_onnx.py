"""Quark on ONNX files of convolutions: AdaQuant and AdaRound.

A file of Quark has one MX format. The layers that are not MXFP4 have its INT8 weights, and activations that are not
MXFP4 its static INT8.
"""

import contextlib
import tempfile

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import ModelQuantizer, get_library_path
from quark.onnx.algorithm.finetuning import fast_finetune
from quark.onnx.quantization.config import algorithm, spec
from quark.onnx.quantization.config.config import QConfig
from torch import Tensor, nn

from tests.benchmarks.accuracy.efficientnet import large_layers
from tests.benchmarks.peers.process import Job, run

INPUT, ATTRIBUTES = "image", {"element_dtype": "fp4_e2m1", "axis": 1, "block_size": 32, "rounding_mode": 2}


class _Reader(CalibrationDataReader):
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self.rewind()

    def get_next(self) -> dict[str, object] | None:
        row = next(self.rows, None)
        return row if row is None else {INPUT: row.numpy()}

    def rewind(self) -> None:
        self.rows = iter(self.inputs.split(1))


class _Session(nn.Module):
    """Run an ONNX file of Quark."""

    def __init__(self, file: str) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(get_library_path("cpu"))
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {INPUT: images.numpy()})[0])


def quantize(job: Job) -> nn.Module:
    _refuse_to_skip()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it writes into the current one
        before, after = "float.onnx", "quantized.onnx"
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(
            job.model, (job.inputs[:2],), before, input_names=[INPUT], dynamic_shapes=shapes, external_data=False
        )
        weights = {f"{name}.weight" for name in large_layers(job.model)}
        layers = [node.name for node in onnx.load(before).graph.node if weights.intersection(node.input)]
        ModelQuantizer(_config(job, layers)).quantize_model(before, after, _Reader(job.inputs))
        return _Session(after)


def _refuse_to_skip() -> None:
    """Let the algorithms raise the error of a layer that they would leave rounded to nearest, with a warning."""
    errors: list[str] = []

    def refuse(warning: str) -> None:
        raise RuntimeError(errors[-1])

    fast_finetune.logger.error, fast_finetune.logger.warning = errors.append, refuse


def _config(job: Job, large: list[str]) -> QConfig:
    int8 = {"calibration_method": spec.CalibMethod.MinMax}
    channels = spec.Int8Spec(**int8, quant_granularity=spec.QuantGranularity.Channel)
    inputs = {"input_tensors": spec.MXFP4E2M1Spec()} if job.format == "W4A4" else {}
    return QConfig(
        spec.QLayerConfig(input_tensors=spec.Int8Spec(**int8), weight=channels),
        specific_layer_config={spec.QLayerConfig(weight=spec.MXFP4E2M1Spec(), **inputs): large},
        algo_config=[getattr(algorithm, name)(**given) for name, given in job.options.items()],
        MXAttributes=ATTRIBUTES,
        WeightsOnly=job.format == "W4",
    )


if __name__ == "__main__":
    run(quantize)
