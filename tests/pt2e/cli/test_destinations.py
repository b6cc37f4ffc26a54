import json
import shlex

import pytest
import torch

from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.language_models import checkpoint, transformers


@pytest.mark.compiled
def test_a_decoder_reaches_transformers(tmp_path, monkeypatch, capsys):
    """By the commands that are printed, from a checkpoint in float32 and without a recipe."""
    monkeypatch.chdir(tmp_path)
    checkpoint("llama", tmp_path / "float", num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("Blocks of 32 values share a scale. " * 40)
    quantize = ["quantize", "--model", "hf:float", "--for", "transformers", "--calibration", "text.txt"]
    assert main([*quantize, "--output", "q"]) == 0
    printed, notes = capsys.readouterr()
    command = printed.splitlines()[-1]
    assert command == (
        "for transformers: pt2mx save-checkpoint q --float float --layout compressed-tensors --output q-transformers"
    )
    for change in (
        "rotations in the weights",
        "a cache in high precision instead of mxint8{32}",
        "the model in bfloat16",
    ):
        assert f"pt2mx: {change}" in notes
    assert main(shlex.split(command)[3:]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained("q-transformers", dtype="auto")
    assert loaded(torch.arange(40)[None]).logits.isfinite().all()
    assert load_tokenizer("q-transformers") is not None


def test_the_form_is_a_recipe(capsys):
    assert main(["recipes", "show", "decoder_smallest", "--for", "gguf,onnx", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert "int8{32}(f16)" in text and "online: false" in text and "kv_cache" not in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--model", "torchvision:resnet18", "--for", "vllm", "--recipe", "mxfp4"],
            "--for vllm takes a language model",
        ),
        (["--model", "torchvision:resnet18", "--for", "vllm"], "vllm does not take the recipe 'cnn_balanced'"),
        (["--model", "hf:a", "--for", "executorch", "--recipe", "mxfp4", "--output", "q"], "takes a program: give"),
        (
            ["--model", "hf:a", "--for", "vllm", "--recipe", "mxint8", "--output", "q"],
            "weights of global are in mxint8",
        ),
        (["--model", "minilm", "--for", "vlm"], "--for 'vlm' is no destination: did you mean 'vllm'"),
        (["--model", "net.py:make", "--for", "onnx"], "give --recipe, a YAML file, a format, or one of"),
        (
            ["--model", "onnx:net.onnx", "--for", "gguf", "--recipe", "nvfp4_weight_only", "--output", "b.onnx"],
            "takes no ONNX file",
        ),
    ],
)
def test_what_is_refused(arguments, text, tmp_path, monkeypatch, capsys):
    """Before the model is looked for, of which no weight is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").touch()
    (tmp_path / "net.py").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    assert main(["quantize", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_quantized_checkpoint_takes_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    checkpoint("llama", tmp_path / "float", num_hidden_layers=1)
    assert main(["convert-checkpoint", "float", "mx", "--recipe", "mxfp4_weight_only", "--dtype", "bfloat16"]) == 0
    assert main(["quantize", "--model", "hf:mx", "--for", "vllm", "--output", "q"]) == 2
    assert "'hf:mx' is quantized already: leave --for out" in capsys.readouterr().err


@pytest.mark.compiled
def test_layers_that_no_checkpoint_holds_are_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 256, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained("f")
    arguments = "quantize --model hf:f --for {} --recipe mxfp4_weight_only --calibration none --output q"
    for name in ("vllm", "cpu,vllm", "gguf"):
        capsys.readouterr()
        assert main(arguments.format(name).split()) == 2
        error = capsys.readouterr().err
        assert f"transformer.h.0.attn.c_attn is a Conv1D: checkpoints, which {name.split(',')[-1]} takes" in error
        assert "export" not in error
    assert main(arguments.format("cpu").split()) == 0
