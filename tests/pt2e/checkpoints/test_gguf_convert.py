"""GGUF files, from and to checkpoints of folders: the same codes, tensor by tensor."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file

from pt2mx import MXError, convert_checkpoint
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.models.gguf_blocks import BLOCK_TYPES
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from tests.float_checkpoints import load_packed_model, of_weights, tensors
from tests.gguf_files import write_gguf
from tests.language_models import tiny_decoder, tokenizer_of_bytes, transformers

gguf = pytest.importorskip("gguf")

IDS = torch.randint(256, (16, 9), generator=torch.Generator().manual_seed(0))
#: model -> layout, recipe of weights
_CASES = {
    "llama": ("compressed-tensors", "mxfp4"),
    "gpt_oss": ("mxfp4", "mxfp4"),
    "mixtral": ("modelopt", "nvfp4"),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Return the folder of a float checkpoint of a family, in shards."""
    folders = {}

    def make(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            fields = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}
            model = tiny_decoder(family, intermediate_size=128, **fields).to(torch.bfloat16)
            model.save_pretrained(folders[family], max_shard_size="20KB")
            tokenizer_of_bytes([("a", "b"), ("c", "d")]).save_pretrained(folders[family])
        return folders[family]

    return make


def _assert_same(first, second):
    """Compare the tensors of two folders; norms of GGUF are float32."""
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        copy = other[name] if tensor.dtype.itemsize == 1 else other[name].to(tensor.dtype)
        assert torch.equal(tensor.flatten().view(torch.uint8), copy.flatten().view(torch.uint8)), name


@pytest.mark.compiled_except("mixtral")
@pytest.mark.parametrize("family", _CASES)
def test_there_and_back(family, floats, tmp_path, logits):
    layout, weights = _CASES[family]
    convert_checkpoint(floats(family), tmp_path / "codes", of_weights(weights), layout=layout)
    report = convert_checkpoint(tmp_path / "codes", tmp_path / "model.gguf", layout="gguf")
    assert not report.kept and {path.name for path in tmp_path.iterdir()} == {"codes", "model.gguf"}
    kind = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}[weights]
    file = GGUFFile(tmp_path / "model.gguf")
    assert [entry.type for entry in file.entries.values()].count(kind) >= 6
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "back", layout=layout, dtype="bfloat16")
    _assert_same(tmp_path / "codes", tmp_path / "back")
    # transformers reads no tokenizer of gpt-oss from GGUF
    assert (tmp_path / "back" / "tokenizer.json").is_file() == (family != "gpt_oss")
    expected = logits(load_packed_model(tmp_path / "codes"))
    assert torch.equal(logits(load_packed_model(tmp_path / "back")), expected)
    # with scales of tensors the values of the file are exact in float32 alone
    actual = logits(load_packed_model(tmp_path / "model.gguf"))
    tolerance = 0 if actual.dtype == expected.dtype else 0.02
    assert torch.allclose(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)


def test_a_float_checkpoint_by_a_recipe(floats, tmp_path):
    """The blocks have the codes that the recipe gives in a folder, and gguf's values of them."""
    convert_checkpoint(floats("llama"), tmp_path / "model.gguf", "mxfp4_weight_only", layout="gguf")
    convert_checkpoint(floats("llama"), tmp_path / "codes", "mxfp4_weight_only")
    file, stored = GGUFFile(tmp_path / "model.gguf"), tensors(tmp_path / "codes")
    name = "model.layers.1.mlp.down_proj.weight"
    row, blocks = BLOCK_TYPES["MXFP4"], file.blocks("blk.1.ffn_down.weight")
    data, scale = row.to_codes("down", blocks)
    assert torch.equal(data, stored[f"{name}_packed"]) and torch.equal(scale, stored[f"{name}_scale"])
    model = load_float_gguf(tmp_path / "model.gguf")
    assert torch.equal(model.get_parameter(name).float(), file.values("blk.1.ffn_down.weight"))
    assert file.metadata["tokenizer.ggml.merges"] == ["a b", "c d"]


def test_q8_0_has_the_bytes_of_gguf(floats, tmp_path):
    """gguf quantizes the values of the file to its blocks."""
    convert_checkpoint(floats("llama"), tmp_path / "model.gguf", of_weights("int8{32}(f16)"), layout="gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    names = [name for name, entry in file.entries.items() if entry.type == "Q8_0"]
    for name in names:
        packed = gguf.quantize(file.values(name).numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert torch.equal(torch.from_numpy(packed), file.blocks(name)), name
    assert len(names) == 15 and file.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(stock(IDS).logits, load_float_gguf(tmp_path / "model.gguf", torch.float32)(IDS).logits)


def test_types_without_a_counterpart_become_values(tmp_path):
    """Of a file in several types a layout keeps the codes that it has; a recipe rounds all values."""
    types = {".*ffn_(gate|up|down).weight": "MXFP4", ".*attn_(q|k|v|output).weight": "Q8_0"}
    path = write_gguf(tiny_decoder("llama"), tmp_path / "model.gguf", types)
    with pytest.raises(MXError, match="loaders of compressed-tensors compute in bfloat16"):
        convert_checkpoint(path, tmp_path / "out")
    report = convert_checkpoint(path, tmp_path / "out", dtype="bfloat16")
    stored, values = tensors(tmp_path / "out"), load_float_gguf(path).state_dict()
    assert len(report.quantized) == 6 and "model.layers.0.self_attn.q_proj.weight" in report.left
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(stored[name], values[name].bfloat16())
    assert stored["model.layers.0.mlp.up_proj.weight_packed"].shape == (96, 32)
    report = convert_checkpoint(path, tmp_path / "all", "mxfp4_weight_only", dtype="bfloat16")
    assert len(report.quantized) == 15
    with pytest.raises(MXError, match="is for codes"):
        write_gguf(tiny_decoder("llama"), path)
        convert_checkpoint(path, tmp_path / "none", weights="nvfp4")


_LLAMA_CPP = [
    ("llama", "mxfp4"),
    ("llama", "nvfp4"),
    ("llama", "int8{32}(f16)"),
    ("llama", "int4_full{32}(f16)"),
    ("mixtral", "nvfp4"),
    ("qwen3", "int8{32}(f16)"),
    ("gemma3", "mxfp4"),
    ("gpt_oss", "mxfp4"),
]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp, a build of llama.cpp, is missing")
@pytest.mark.parametrize(("family", "weights"), _LLAMA_CPP)
def test_llama_cpp_has_our_probabilities(family, weights, floats, tmp_path):
    """llama.cpp rounds inputs to 8 bits, and so computes nearly the probabilities of transformers with the values."""
    import xllamacpp

    source = floats(family)
    if family == "gpt_oss":  # its experts are quantized as one tensor
        source = tmp_path / "codes"
        convert_checkpoint(floats(family), source, of_weights(weights), layout="mxfp4")
    path = tmp_path / "model.gguf"
    convert_checkpoint(source, path, None if family == "gpt_oss" else of_weights(weights), layout="gguf")
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.warmup, options.cpuparams.n_threads = str(path), 256, False, 1
    server = xllamacpp.Server(options)
    for ids in IDS.split(1):
        request = {"prompt": ids[0].tolist(), "n_predict": 1, "temperature": 0, "n_probs": 20}
        answer = server.handle_completions(request)["choices"][0]["logprobs"]
        if answer is not None:  # the most probable token is a text, and no part of a letter
            break
    theirs = {row["id"]: row["logprob"] for row in answer["content"][0]["top_logprobs"]}
    with torch.no_grad():
        ours = load_float_gguf(path, torch.float32)(ids).logits[0, -1].log_softmax(-1)
    assert len(theirs) == 20
    assert all(abs(ours[token] - probability) < 0.03 for token, probability in theirs.items())


def test_an_interrupted_run_continues(floats, tmp_path, monkeypatch):
    whole, resumed = tmp_path / "whole.gguf", tmp_path / "resumed.gguf"
    convert_checkpoint(floats("llama"), whole, layout="gguf")
    names = []

    def interrupt(name, count):
        names.append(name)
        if len(names) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(floats("llama"), resumed, layout="gguf", finished=interrupt)
    (unfinished,) = tmp_path.glob(".resumed.gguf.*.partial")
    with unfinished.open("ab") as file:
        file.write(b"half a tensor")
    with pytest.raises(MXError, match="is an unfinished conversion with other settings or of another checkpoint"):
        convert_checkpoint(floats("llama"), resumed, layout="gguf", dtype="float16")
    report = convert_checkpoint(floats("llama"), resumed, layout="gguf")
    assert report.kept == names and resumed.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def _damage(folder, name, change):
    """Change a tensor of a checkpoint."""
    (path,) = [one for one in folder.glob("*.safetensors") if name in load_file(one)]
    stored = load_file(path)
    stored[name] = change(stored[name])
    save_file(stored, path, metadata={"format": "pt"})


_UP = "model.layers.0.mlp.up_proj.weight"
#: fault -> suffix of the tensor, its change, and the error
_BAD = {
    "block scale of 0": ("_scale", torch.zeros_like, "holds a scale of 0 for codes that are not 0"),
    "tensor scale of NaN": ("_scale_2", lambda one: one * float("nan"), "is nan: a tensor scale is a positive number"),
    "grid of no block": ("_scale", lambda one: one[:, 1:].contiguous(), "and scales of shape (128, 3)"),
}


@pytest.mark.parametrize("case", _BAD)
def test_bad_checkpoints_leave_nothing(case, floats, tmp_path, capsys):
    suffix, change, message = _BAD[case]
    folder, output = tmp_path / "codes", tmp_path / "out"
    output.mkdir()
    convert_checkpoint(floats("llama"), folder, of_weights("nvfp4"), layout="modelopt")
    _damage(folder, _UP + suffix, change)
    assert main(["convert-checkpoint", str(folder), str(output / "model.gguf"), "--layout", "gguf"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("pt2mx: error: ") and message in error
    assert not list(output.iterdir())


def test_bad_files_leave_nothing(floats, tmp_path, capsys):
    path = write_gguf(tiny_decoder("llama"), tmp_path / "model.gguf", {".*ffn_up.weight": "MXFP4"})
    path.write_bytes(path.read_bytes()[:-100])
    for arguments, message in (
        ([str(path), str(tmp_path / "out")], "it is truncated or damaged, fetch it again"),
        ([str(tmp_path / "none.gguf"), str(tmp_path / "out")], "no file or folder"),
        ([str(floats("llama")), str(tmp_path / "out"), "--layout", "gguf"], "its name must end in .gguf"),
        ([str(floats("llama")), str(tmp_path / "no" / "out.gguf"), "--layout", "gguf"], "cannot write"),
    ):
        assert main(["convert-checkpoint", *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("pt2mx: error: ") and message in error
    assert [one.name for one in tmp_path.iterdir()] == ["model.gguf"]


def test_formats_that_gguf_lacks(floats, tmp_path):
    convert_checkpoint(floats("llama"), tmp_path / "fp8", of_weights("mxfp8"), layout="fp8")
    with pytest.raises(MXError, match=r"gguf cannot hold .* in fp8_e4m3: it has fp4_e2m1, nvfp4, int8\{32\}\(f16\)"):
        convert_checkpoint(tmp_path / "fp8", tmp_path / "model.gguf", layout="gguf")
    assert not list(tmp_path.glob("*.gguf"))
