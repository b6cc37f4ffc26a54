import json

import pytest
import torch
from safetensors.torch import load_file

import pt2mx
from pt2mx.pt2e.checkpoints.engines import TRANSFORMERS, VLLM
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from tests.float_checkpoints import load_packed_model
from tests.language_models import FAMILIES, checkpoint, tiny_decoder, tokenizer_of_bytes, transformers


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a bfloat16 checkpoint, "float"; the MX checkpoint "mx" converted from it file by file; and the
    result of `pt2mx quantize` for that, "quantized"."""
    path = tmp_path_factory.mktemp("checkpoints")
    name, sizes = FAMILIES["llama"]
    config = getattr(transformers, name)(**{**sizes, "num_hidden_layers": 1})
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path / "float")
    tokenizer_of_bytes().save_pretrained(path / "float")
    assert main(["convert-checkpoint", str(path / "float"), str(path / "mx")]) == 0
    assert main(["quantize", "--model", f"hf:{path / 'mx'}", "--output", str(path / "quantized")]) == 0
    return path


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_codes_go_in_and_out_to_the_bit(place, capsys):
    arguments = ["save-checkpoint", str(place / "quantized"), "--float", str(place / "float"), "--output"]
    assert main([*arguments, str(place / "again")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "again: 0.1 MB" in printed[0] and printed[1] == f"{VLLM} loads it; {TRANSFORMERS} loads it"
    before, after = tensors(place / "mx"), tensors(place / "again")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(place / "again")(ids).logits
        # the language model multiplies codes, in another order
        assert torch.allclose(pt2mx.LanguageModel.from_pretrained(place / "quantized")(ids).logits, expected, atol=0.02)
    assert main([*arguments, str(place / "values"), "--unpack", "lm_head"]) == 0
    codes = before["lm_head.weight_packed"], before["lm_head.weight_scale"]
    values = pt2mx.dequantize_mx(*codes, "mxfp4", target_dtype=torch.bfloat16)
    assert torch.equal(tensors(place / "values")["lm_head.weight"], values)


@pytest.mark.compiled
def test_rotations_in_the_weights(tmp_path, monkeypatch):
    """A recipe with them, `quantize` and `save-checkpoint`: transformers computes the logits of the language model."""
    monkeypatch.chdir(tmp_path)
    model = tiny_decoder("llama", num_hidden_layers=1, tie_word_embeddings=True).bfloat16()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained("float")
    tokenizer_of_bytes([("t", "h")]).save_pretrained("float")
    algorithms = "{rotation: {online: false}, scale_search: {}, gptq: {}}"
    regexes = "{'.*(embed_tokens|lm_head)': null}"
    (tmp_path / "r.yaml").write_text(
        f"global: {{weight: mxfp4(even)}}\nmodule_name_regex: {regexes}\nalgorithms: {algorithms}\n"
    )
    (tmp_path / "text.txt").write_text("a text to calibrate with, " * 40)
    quantize = ["quantize", "--model", "hf:float", "--recipe", "r.yaml", "--calibration", "text.txt"]
    assert main([*quantize, "--output", "quantized"]) == 0
    ids = torch.arange(40).reshape(2, 20)
    quantized = pt2mx.LanguageModel.from_pretrained("quantized")
    assert not quantized.config.tie_word_embeddings
    assert main(["save-checkpoint", "quantized", "--float", "float", "--output", "out"]) == 0
    assert main(["save-checkpoint", "quantized", "--float", "float", "--output", "m.gguf", "--layout", "gguf"]) == 0
    with torch.no_grad():
        logits = quantized(ids).logits
        loaded = transformers.AutoModelForCausalLM.from_pretrained("out")
        assert torch.allclose(loaded(ids).logits, logits, atol=0.02) and not loaded.config.tie_word_embeddings
        assert torch.allclose(load_float_gguf("m.gguf")(ids).logits.to(logits), logits, atol=0.03)
        exact = model(ids).logits
        assert (logits - exact).norm() < 0.4 * exact.norm()


@pytest.mark.compiled
def test_a_checkpoint_in_float32(tmp_path, monkeypatch, capsys):
    """The error about its program names an option, and that option works."""
    monkeypatch.chdir(tmp_path)
    checkpoint("llama", tmp_path / "float32", num_hidden_layers=1)
    quantize = ["quantize", "--model", "hf:float32", "--recipe", "mxfp4_weight_only"]
    rest = ["--float", "float32", "--output", "mx", "--unpack", ".*embed_tokens"]
    assert main([*quantize, "--output", "wide"]) == 0
    assert main(["save-checkpoint", "wide", *rest]) == 2
    assert "quantize it in bfloat16 (model.to(...) in Python, `pt2mx quantize --dtype bf" in capsys.readouterr().err
    assert main([*quantize, "--output", "narrow", "--dtype", "bfloat16"]) == 0
    assert main(["save-checkpoint", "narrow", *rest]) == 0
    assert tensors(tmp_path / "mx")["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quantize", "--model", "hf:mx", "--recipe", "mxfp4", "--output", "o"], "leave --recipe out"),
        (["quantize", "--model", "hf:mx", "--output", "o.pt2"], "becomes a language model: give --output a folder"),
        (["quantize", "--model", "hf:mx", "--output", "mx"], "is the folder of the checkpoint"),
        (["quantize", "--model", "hf:float", "--output", "o"], "give --recipe, a YAML file, a format, or one of"),
        (["save-checkpoint", "quantized", "--float", "float", "--output", "mx", "--unpack", ".*"], "is there already"),
        (["save-checkpoint", "nowhere", "--float", "float", "--output", "o"], "no file or folder 'nowhere': give"),
        (["save-checkpoint", "quantized", "--float", "nowhere", "--output", "o"], "nowhere"),
    ],
)
def test_errors(place, arguments, text, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") <= 2 and not (place / "o").exists()


@pytest.fixture
def llama(tmp_path):
    tiny_decoder("llama").bfloat16().save_pretrained(tmp_path / "float", max_shard_size="20KB")
    return str(tmp_path / "float")


def test_a_checkpoint_is_converted(llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert-checkpoint", llama, out, "--recipe", "mxfp4_weight_only", "--jobs", "2"]) == 0
    printed, notes = capsys.readouterr()
    assert printed.splitlines()[0] == "mxfp4_e2m1{32}(even,even): 15 tensors"
    assert printed.splitlines()[1].startswith(f"{out}: 0.1 MB (the float checkpoint: 0.2 MB); convert ")
    assert printed.splitlines()[2] == f"{VLLM} loads it; {TRANSFORMERS} loads it"
    assert "in high precision: model.embed_tokens.weight: loaders of compressed-tensors keep" in notes
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded(torch.arange(40)[None]).logits.isfinite().all()


@pytest.mark.compiled
def test_the_command_says_what_it_chooses(llama, place, tmp_path, capsys):
    """Inputs in the scale mode of the layout, a head that no engine loads, and what engines do."""
    out = tmp_path / "out"
    assert main(["convert-checkpoint", llama, str(out), "--recipe", "mxfp8"]) == 0
    assert "pt2mx: inputs in mxfp8_e4m3{32} are stated as mxfp8_e4m3{32}(rceil), which is" in capsys.readouterr().err
    save = ["save-checkpoint", str(place / "quantized"), "--float", str(place / "float"), "--layout", "quark"]
    assert main([*save, "--output", str(tmp_path / "values")]) == 0
    printed, notes = capsys.readouterr()
    assert "pt2mx: lm_head is written as values: no engine is known to load its codes in quark" in notes
    assert f"{VLLM} loads it; " in printed and "lm_head.weight_scale" not in tensors(tmp_path / "values")
    assert main([*save, "--output", str(tmp_path / "codes"), "--quantized-head", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["engines"][str(VLLM)].startswith("does not load the head in fp4_e2m1")
    assert fields["changes"] == [] and "lm_head.weight_scale" in tensors(tmp_path / "codes")


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_checkpoint_is_converted_to_nvfp4(layout, llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert-checkpoint", llama, out, "--recipe", "nvfp4_weight_only", "--layout", layout]) == 0
    spec = "nvfp4_e2m1{16}(mse)" if layout == "modelopt" else "fp4_e2m1{16}(mse,e4m3_f32_divisor)"
    assert capsys.readouterr().out.splitlines()[0] == f"{spec}: 15 tensors"
    with torch.no_grad():
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(llama), load_packed_model(tmp_path / "out")
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(pt2mx.fake_quantize_mx(layer.weight, "nvfp4(mse)"))
        got, want = (one(torch.arange(40)[None]).logits for one in (loaded, model))
    assert (got - want).norm() < 0.1 * want.norm()  # layers that read one tensor share a tensor scale
    assert main(["convert-checkpoint", llama, str(tmp_path / "no"), "--recipe", "nvfp4", "--layout", layout]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert "need a calibrated tensor scale: take a recipe of weights" in error
    assert not (tmp_path / "no").exists()


def test_layout_and_dtype(tmp_path):
    tiny_decoder("gpt_oss").save_pretrained(tmp_path / "float")
    arguments = [str(tmp_path / "float"), str(tmp_path / "out"), "--layout", "mxfp4", "--dtype", "bfloat16"]
    assert main(["convert-checkpoint", *arguments]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4" and config["dtype"] == "bfloat16"


def test_many_tensors_of_one_reason_are_counted(tmp_path, capsys):
    tiny_decoder("gpt_oss").bfloat16().save_pretrained(tmp_path / "float")
    assert main(["convert-checkpoint", str(tmp_path / "float"), str(tmp_path / "out"), "--layout", "mxfp4"]) == 0
    assert "and 6 more: mxfp4 has experts alone" in capsys.readouterr().err


def test_bad_input_is_one_line(llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    for arguments, message in [
        ([str(tmp_path / "none"), out], "give the folder of a checkpoint, or a GGUF file"),
        ([llama, llama], "holds files already: give a new folder"),
        ([llama, out, "--recipe", "mxint8"], "compressed-tensors cannot hold"),
        ([llama, out, "--recipe", "mxfp5"], "no recipe 'mxfp5'"),
        ([llama, out, "--jobs", "0"], "jobs=0"),
    ]:
        assert main(["convert-checkpoint", *arguments]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and error.startswith("pt2mx: error: ") and "\n" not in error
    assert not (tmp_path / "out").exists()
    assert main(["convert-checkpoint", llama, out, "--layout", "gguf"]) == 2
    assert "its name must end in .gguf" in capsys.readouterr().err
