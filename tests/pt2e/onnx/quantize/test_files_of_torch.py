"""Float ONNX files as torch exports them today: a small model, and real ones."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from pt2mx import MXQuantizationConfig, MXQuantizer, quantize_onnx
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import load_minilm
from tests.models import Attention
from tests.onnx_float_files import export, with_dequantized_weights
from tests.onnx_nodes import differences, run

BATCH = torch.export.Dim("batch")


class Captions(nn.Module):
    """Attention over words, plus the features of an image."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(50, 48), Attention(48, heads=3)
        self.stem = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 48, 3))
        self.head = nn.Linear(48, 50)

    def forward(self, images, ids):  # (B, 3, H, W), (B, S) -> (B, S, 50)
        return self.head(self.attention(self.embedding(ids)) + self.stem(images).mean((2, 3)).unsqueeze(1))


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    path = tmp_path_factory.mktemp("captions") / "captions.onnx"
    inputs = (torch.randn(2, 3, 8, 8), torch.randint(0, 50, (2, 5)))
    export(Captions(), inputs, path, ({0: BATCH}, {0: BATCH, 1: torch.export.Dim("sequence", max=64)}))
    return path


def feeds():
    """Return a batch of other lengths."""
    return {"images": np.random.randn(3, 3, 8, 8).astype(np.float32), "ids": np.random.randint(0, 50, (3, 7))}


def test_every_node_of_a_small_model(captions, tmp_path):
    report = quantize_onnx(captions, tmp_path / "mx.onnx", "mxfp8")
    matmuls = ["attention.query", "attention.key", "attention.value", "attention", "attention", "attention.out"]
    modules = [o.module for o in report.operators if o.quantized]
    assert sorted(modules) == sorted(["embedding", *matmuls, "stem.0", "stem.3", "head"])
    assert len(modules) == len(report.operators)
    wrong = differences(onnx.load(tmp_path / "mx.onnx"), feeds())
    assert set(wrong.values()) == {0} and len(wrong) == 8 + 9  # constants, activations


def test_weight_only_of_a_small_model(captions, tmp_path):
    quantize_onnx(captions, tmp_path / "mx.onnx", "mxfp4_weight_only")
    model, batch = onnx.load(tmp_path / "mx.onnx"), feeds().values()
    (got,), (want,) = run(model, *batch), run(with_dequantized_weights(onnx.load(captions), model), *batch)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_names_of_torchs_modules(captions, tmp_path):
    """The exporter records scopes and classes."""
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4"))
    quantizer.set_module_type("torch.nn.Embedding", None).set_module_name_regex(r"attention\.(query|key)", None)
    quantizer.set_operator_type("aten.linear", MXQuantizationConfig(weight="mxfp8", activation="mxfp8"))
    report = quantize_onnx(captions, tmp_path / "mx.onnx", quantizer)
    by_module = {o.module: {operand.spec for operand in o.operands} for o in report.operators}
    linear, convolution = {"mxfp8_e4m3{32}"}, {"mxfp4_e2m1{32}"}
    assert by_module == {
        "embedding": set(), "attention.query": set(), "attention.key": set(), "attention": set(),
        "attention.value": linear, "attention.out": linear, "head": linear,
        "stem.0": convolution, "stem.3": convolution,
    }  # fmt: skip


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """ResNet-50 with random weights, as torch exports it; the exporter folds batch norms."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("resnet") / "resnet50.onnx"
    module = import_extra("torchvision", "vision").models.resnet50(weights=None)
    export(module, (torch.randn(2, 3, 64, 64),), path, ({0: torch.export.Dim("batch")},))
    return path


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    encoder, tokenize = load_minilm()
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    inputs = tokenize(["one sentence", "and another that is longer"])
    export(encoder, inputs, path, {"input_ids": shape, "attention_mask": shape})
    return path


def size(path):
    return path.stat().st_size


#: recipe -> the largest size of the file, in units of the float file's
LARGEST = {"mxfp4": 0.15, "mxfp8": 0.28, "mxfp4_weight_only": 0.15}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["mxfp4", "mxfp8"])
def test_resnet(resnet, tmp_path, config):
    report = quantize_onnx(resnet, tmp_path / "mx.onnx", config)
    assert sum(o.quantized for o in report.operators) == len(report.operators) == 54
    assert [o.module for o in report.operators][:3] == ["conv1", "layer1.0.conv1", "layer1.0.conv2"]
    assert size(tmp_path / "mx.onnx") < LARGEST[config] * size(resnet)
    wrong = differences(onnx.load(tmp_path / "mx.onnx"), {"x": np.random.randn(1, 3, 64, 64).astype(np.float32)})
    assert set(wrong.values()) == {0} and len(wrong) == 104


@pytest.mark.slow
@pytest.mark.parametrize("config", ["mxfp4", "mxfp8"])
def test_minilm(minilm, tmp_path, config):
    report = quantize_onnx(minilm, tmp_path / "mx.onnx", config)
    assert sum(o.quantized for o in report.operators) == len(report.operators) == 51
    assert size(tmp_path / "mx.onnx") < LARGEST[config] * size(minilm)
    ids = np.random.randint(0, 30000, (2, 7))
    wrong = differences(onnx.load(tmp_path / "mx.onnx"), {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert set(wrong.values()) == {0} and len(wrong) == 87


@pytest.mark.slow
def test_weight_only_of_minilm(minilm, tmp_path):
    quantize_onnx(minilm, tmp_path / "mx.onnx", "mxfp4_weight_only")
    assert size(tmp_path / "mx.onnx") < LARGEST["mxfp4_weight_only"] * size(minilm)
    model = onnx.load(tmp_path / "mx.onnx")
    ids = np.random.randint(0, 30000, (2, 7))
    (got,) = run(model, ids, np.ones_like(ids))
    (want,) = run(with_dequantized_weights(onnx.load(minilm), model), ids, np.ones_like(ids))
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_weight_only_of_resnet(resnet, tmp_path):
    quantize_onnx(resnet, tmp_path / "mx.onnx", "mxfp4_weight_only")
    model, x = onnx.load(tmp_path / "mx.onnx"), torch.randn(1, 3, 64, 64)
    (got,), (want,) = run(model, x), run(with_dequantized_weights(onnx.load(resnet), model), x)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
