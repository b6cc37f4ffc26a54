"""Each cell of the matrix of recipes and destinations, done with a tiny model."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.checkpoints.destinations import DESTINATIONS, cell, for_destinations, needs, next_command, table
from pt2mx.pt2e.checkpoints.engines import VLLM
from pt2mx.pt2e.executorch.edge import edge_ready
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from pt2mx.pt2e.onnx.runtime import load
from pt2mx.pt2e.quantizer import shipped
from tests.documents import ROOT
from tests.engines.vllm.expectations import refusals
from tests.language_models import tiny_decoder, transformers

_IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
_CELLS = [
    (recipe, destination)
    for recipe in shipped.names()
    for destination in DESTINATIONS
    if cell(recipe, destination) != "no"
]


def _quantized(recipe, destination, dtype, device="cpu"):
    """Return a decoder quantized by the form of a recipe, its float model, and the layout of the destination."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 128, "tie_word_embeddings": False}
    model = tiny_decoder("llama", **sizes).to(device, dtype)
    form = for_destinations(recipe, [destination])
    quantized = pt2mx.quantize_language_model(model, form.quantizer, [_IDS.to(device)])
    return quantized, model, form.layouts.get(destination)


def _vllm(recipe, tmp_path):
    quantized, model, layout = _quantized(recipe, "vllm", torch.bfloat16)
    report = pt2mx.save_checkpoint(quantized, model, tmp_path / "saved", layout.name)
    assert refusals(tmp_path / "saved") == []
    assert report.engines[str(VLLM)].startswith("loads it")


def _transformers(recipe, tmp_path):
    quantized, model, layout = _quantized(recipe, "transformers", torch.bfloat16)
    pt2mx.save_checkpoint(quantized, model, tmp_path / "saved", layout.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    want, got = quantized(input_ids=_IDS).logits, loaded(_IDS).logits
    inputs = [config for *_, config in for_destinations(recipe, ["transformers"]).quantizer.settings if config]
    # bfloat16 in another order of sums gives some inputs other codes
    assert (got - want).norm() < (0.1 if any(one.activation for one in inputs) else 0.02) * want.norm()


def _gguf(recipe, tmp_path):
    quantized, model, layout = _quantized(recipe, "gguf", torch.float32)
    pt2mx.save_checkpoint(quantized, model, tmp_path / "saved.gguf", layout.name)
    loaded = load_float_gguf(tmp_path / "saved.gguf", torch.float32)
    assert torch.allclose(loaded(_IDS).logits, quantized(input_ids=_IDS).logits, atol=1e-4)


def _onnx(recipe, tmp_path, target="pt2mx"):
    if shipped.task_of(recipe) in ("encoder", "cnn"):
        converted, x = _program(recipe)
        pt2mx.export_onnx(converted, tmp_path / "saved.onnx", (x,), target=target)
        feeds, want = [x.numpy()], converted(x)
    else:
        quantized, *_ = _quantized(recipe, "onnx", torch.float32)
        pt2mx.export_onnx(quantized, tmp_path / "saved.onnx", target=target)
        heads = quantized.config.num_key_value_heads, 0, quantized.config.head_dim
        past = [np.zeros((2, *heads), np.float32)] * 2
        feeds, want = [_IDS.numpy(), np.ones_like(_IDS), *past], quantized(input_ids=_IDS).logits
    got = torch.from_numpy(_run_onnx(tmp_path / "saved.onnx", feeds, target))
    if target == "openvino" and "int8" in for_destinations(recipe, ["openvino"]).quantizer.to_recipe():
        assert (got - want).norm() < 0.05 * want.norm()  # it multiplies INT8 as integers where the processor does
    else:
        assert torch.allclose(got, want, atol=2e-3)


def _run_onnx(path, feeds, target):
    runtime = "openvino" if target == "openvino" else "onnxruntime"
    pytest.importorskip(runtime)
    file = load(path, runtime)
    (first, *_) = file.call(dict(zip(file.inputs, feeds, strict=True))).values()
    return first


def _openvino(recipe, tmp_path):
    _onnx(recipe, tmp_path, "openvino")


def _program(recipe, device="cpu"):
    """Return a converted network of two layers, of the kinds that the recipe's settings name, and its input."""
    torch.manual_seed(0)
    if shipped.task_of(recipe) == "asr":
        layers = {"embedding": nn.Embedding(32, 64), "linear": nn.Linear(64, 64), "lm_head": nn.Linear(64, 32)}
        model, x = nn.Sequential(OrderedDict(layers)).eval(), torch.randint(32, (3, 8))
    elif shipped.task_of(recipe) == "cnn":
        model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()).eval()
        x = torch.randn(1, 3, 10, 10)
    else:
        model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval(), torch.randn(3, 64)
    model, x = model.to(device), x.to(device)
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    exported = torch.export.export(model, (x,)).module()
    if quantizer.algorithms:
        exported = pt2mx.optimize(exported, quantizer, [(x,)])
    prepared = pt2mx.prepare_pt2e(exported, quantizer)
    prepared(x)
    return pt2mx.convert_pt2e(prepared), x


def _executorch(recipe, tmp_path):
    converted, x = _program(recipe)
    program = edge_ready(torch.export.export(converted, (x,)))
    assert torch.allclose(program.module()(x), converted(x), atol=1e-5)


def _torch(recipe, device):
    if shipped.task_of(recipe) in ("encoder", "cnn"):
        converted, x = _program(recipe, device)
        assert converted(x).isfinite().all() and converted(x).device.type == device
    else:
        quantized, model, _ = _quantized(recipe, "cpu", torch.float32, device)
        ids = _IDS.to(device)
        expected = model(ids).logits
        assert (quantized(input_ids=ids).logits - expected).norm() < 0.6 * expected.norm()
        assert quantized.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 28)


def _cpu(recipe, tmp_path):
    _torch(recipe, "cpu")


def _cuda(recipe, tmp_path):
    _torch(recipe, "cuda")


_ARRIVE = {
    "vllm": _vllm,
    "transformers": _transformers,
    "gguf": _gguf,
    "onnx": _onnx,
    "openvino": _openvino,
    "executorch": _executorch,
    "cpu": _cpu,
    "cuda": _cuda,
}


@pytest.mark.slow_except("decoder_balanced-[vtg]*", "cnn_smallest-ex*")
@pytest.mark.parametrize(
    ("recipe", "destination"),
    [pytest.param(*one, marks=[pytest.mark.cuda] * (one[1] == "cuda")) for one in _CELLS],
)
@pytest.mark.compiled_cases("decoder_balanced-[vtg]*")
def test_a_recipe_arrives(recipe, destination, tmp_path):
    with torch.no_grad():
        _ARRIVE[destination](recipe, tmp_path)


def test_the_matrix():
    assert table() in (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    assert list(_ARRIVE) == list(DESTINATIONS)
    assert all(cell(recipe, "cpu") == "yes" for recipe in shipped.names())


@pytest.mark.parametrize(
    ("recipe", "destination", "reason"),
    [
        ("mxint8", "vllm", "vllm does not take the recipe 'mxint8': weights of global are in mxint8{32}; inputs of"),
        ("mxfp8", "gguf", "gguf does not take the recipe 'mxfp8': weights of global are in mxfp8_e4m3{32}"),
        ("mxfp4{64}", "vllm", "weights of global are in mxfp4_e2m1{64}"),
        ("mxfp4_first_last_mxfp8", "vllm", "first 1 gives formats to operators that vLLM multiplies at once"),
        ("mxfp6", "vllm", "mxfp6_e2m3{32} (vLLM 0.26.0: its compressed-tensors 0.17 takes 8 bits alone)"),
        ("cnn_best", "vllm", "no command writes a model of this task (cnn) for it"),
        ("decoder_best", "executorch", "no command writes a model of this task (decoder) for it"),
        ("mxfp4", "vlm", "unknown destination 'vlm': did you mean 'vllm'"),
    ],
)
def test_what_no_form_takes(recipe, destination, reason):
    with pytest.raises(MXError) as error:
        for_destinations(recipe, [destination])
    assert reason in str(error.value)


def test_several_destinations_take_one_form():
    form = for_destinations("decoder_smallest", ["vllm", "onnx"])
    assert str(form.quantizer.settings[0][2].weight) == "mxfp4_e2m1{32}(even,even)"
    assert form.quantizer.kv_cache is None and needs(form.quantizer) == []
    assert next_command(form, "vllm", "org/a b", "q") == (
        "pt2mx save-checkpoint q --float 'org/a b' --layout compressed-tensors --output q-vllm"
    )
    assert next_command(form, "cpu", "org/a", "q") == ""
    with pytest.raises(MXError, match=r"vllm does not take the recipe 'decoder_smallest': weights"):
        for_destinations("decoder_smallest", ["vllm", "gguf"])  # int8 of GGUF is no format of vLLM's layouts


def test_a_quantizer_stays_as_it_is():
    quantizer = pt2mx.MXQuantizer.from_recipe("decoder_best")
    before = quantizer.to_recipe()
    for_destinations(quantizer, ["onnx"])
    for_destinations("decoder_best", ["vllm", "transformers"])
    assert quantizer.to_recipe() == before
    with pytest.raises(MXError, match="vllm does not take the settings: weights of global are in mxint8"):
        for_destinations(quantizer, ["vllm"])  # formats are exchanged for recipes of a task alone
