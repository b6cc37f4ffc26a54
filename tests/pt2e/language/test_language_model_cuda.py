import pytest
import torch

from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from pt2mx.pt2e.cli.command import main
from tests.language_models import checkpoint, padded, tiny_decoder

pytestmark = pytest.mark.cuda


@pytest.fixture(params=[None, "mxfp8"])
def made(request, tmp_path):
    """A model on the CPU, its folder and a call of `generate`."""
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache(request.param)
    quantized = quantize_language_model(tiny_decoder("llama"), quantizer)
    quantized.save_pretrained(tmp_path)
    return quantized, tmp_path, {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def test_a_folder_of_the_cpu_is_compiled_on_a_gpu(made):
    quantized, folder, options = made
    ids, mask = padded()
    moved = LanguageModel.from_pretrained(folder, "cuda")
    moved.compile(mode="reduce-overhead")
    result = moved.generate(ids.cuda(), attention_mask=mask.cuda(), **options)
    assert result.device.type == "cuda"
    assert torch.equal(result.cpu(), quantized.generate(ids, attention_mask=mask, **options))


def test_packages(made):
    quantized, folder, options = made
    ids, mask = padded()
    assert main(["compile", str(folder), "--device", "cuda"]) == 0
    loaded = LanguageModel.from_pretrained(folder, "cuda")
    assert loaded.runner._single.many is not loaded.decoder
    result = loaded.generate(ids.cuda(), attention_mask=mask.cuda(), **options)
    assert torch.equal(result.cpu(), quantized.generate(ids, attention_mask=mask, **options))


def test_quantized_on_a_gpu(tmp_path):
    checkpoint("llama", tmp_path / "llama")
    model, folder = f"hf:{tmp_path / 'llama'}", tmp_path / "quantized"
    command = ["quantize", "--model", model, "--recipe", "mxfp4_weight_only", "--output"]
    assert main([*command, str(folder), "--device", "cuda"]) == 0
    assert main([*command, str(tmp_path / "on_cpu")]) == 0
    on_gpu = LanguageModel.from_pretrained(folder)
    assert on_gpu.device.type == "cuda"
    codes = LanguageModel.from_pretrained(tmp_path / "on_cpu").program.state_dict
    assert all(torch.equal(on_gpu.program.state_dict[name].cpu(), codes[name]) for name in codes)
    program, package = str(tmp_path / "logits.pt2"), str(tmp_path / "logits.aoti.pt2")
    assert main([*command, program, "--device", "cuda"]) == 0
    assert main(["compile", program, "--output", package, "--device", "cuda"]) == 0
    assert main(["run", package]) == 0
