"""Damaged headers and configurations: an `MXError`, or the same tensors; never other weights or another error."""

import json
import shutil
import time

import pytest
import torch

from pt2mx import MXError, convert_checkpoint
from pt2mx.pt2e.checkpoints.conversion_plan import plan_conversion
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.checkpoints.sources import read_source
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_tensors import GGUFTensors, open_gguf
from pt2mx.pt2e.models.layouts import layout_named
from tests.damaged_files import damaged
from tests.float_checkpoints import float_checkpoint, load_packed_model, of_weights
from tests.gguf_files import write_gguf
from tests.language_models import tiny_decoder

#: the attention's weights are packed, others floats
_PACKED = {r"blk\..*attn_.\.weight": "MXFP4", r"blk\..*ffn_.*": "Q8_0"}


def _values(folder):
    """Return the tensors of a float checkpoint, after the checks of a conversion."""
    layout = layout_named("compressed-tensors")
    source = read_source(folder, layout, False)
    plan_conversion(source, of_weights("mxfp4"), layout, None)
    return dict(source.tensors)


def _gguf_values(path):
    file, model = open_gguf(path)
    return dict(GGUFTensors(file, model, lambda parameter, form: True))


def _survivors(path, content, begin, end, count, read):
    """Yield what `read` returns for damaged copies of a file that it does not refuse."""
    for damage in damaged(content, begin, end, count):
        path.write_bytes(damage)
        try:
            yield read()
        except MXError as error:
            assert "\n" not in str(error)
    path.write_bytes(content)


def _equal(read, expected):
    return read.keys() == expected.keys() and all(
        read[name].dtype == tensor.dtype and torch.equal(read[name], tensor) for name, tensor in expected.items()
    )


def test_a_damaged_header_of_safetensors(tmp_path):
    folder = float_checkpoint("llama", tmp_path / "float", shard="1GB")
    path, expected = folder / "model.safetensors", _values(folder)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    survivors = list(_survivors(path, content, 0, end, 300, lambda: _values(folder)))
    assert survivors and all(_equal(read, expected) for read in survivors)


@pytest.mark.compiled_cases("config.json")
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_configuration(file, llama):
    path, expected = llama / file, _values(llama)
    content = path.read_bytes()
    survivors = list(_survivors(path, content, 0, len(content), 150, lambda: _values(llama)))
    assert survivors and all(_equal(read, expected) for read in survivors)


def test_a_damaged_configuration_of_codes(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4"), dtype="bfloat16")
    path = tmp_path / "mx" / "config.json"
    content = path.read_bytes()
    assert list(_survivors(path, content, 0, len(content), 60, lambda: load_packed_model(tmp_path / "mx")))


def test_a_damaged_header_of_gguf(tmp_path):
    path = write_gguf(tiny_decoder("llama"), tmp_path / "model.gguf", _PACKED)
    expected, content = _gguf_values(path), path.read_bytes()
    begin, end = content.index(b"token_embd.weight") - 8, min(entry.begin for entry in GGUFFile(path).entries.values())
    for first, last in ((4, 24), (begin, end)):  # the counts, the table
        survivors = list(_survivors(path, content, first, last, 120, lambda: _gguf_values(path)))
        assert all(_equal(read, expected) for read in survivors)
    assert survivors  # the padding of the table
    list(_survivors(path, content, 24, begin, 120, lambda: _gguf_values(path)))  # the metadata


def _with_dtype(path, name, dtype):
    """Name another dtype of the same size in the header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[name]["dtype"] = dtype
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("dtype", ["I16", "U16"])
def test_integers_of_a_float_model(name, dtype, tmp_path):
    folder = float_checkpoint("llama", tmp_path / "float", shard="1GB")
    convert_checkpoint(folder, tmp_path / "mx", of_weights("mxfp4"))
    _with_dtype(folder / "model.safetensors", name, dtype)
    with pytest.raises(MXError, match=rf"holds {name} in torch.u?int16, which are codes, and its config.json says"):
        convert_checkpoint(folder, tmp_path / "out", of_weights("mxfp4"))
    assert not (tmp_path / "out").exists()
    if "up_proj" not in name:
        _with_dtype(tmp_path / "mx" / "model.safetensors", name, dtype)
        with pytest.raises(MXError, match=f"holds codes or integers of {name}, which its configuration calls unconv"):
            load_checkpoint(tmp_path / "mx")


def _nested(folder, file, depth=100_000):
    (folder / file).write_text('{"a":' * depth)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_deeply_nested_json(file, llama, tmp_path):
    _nested(llama, file)
    with pytest.raises(MXError, match=rf"cannot read .*{file}.*recursion"):
        convert_checkpoint(llama, tmp_path / "out", of_weights("mxfp4"))


#: what a damaged file says -> the words of the error
_COUNTS = {"num_hidden_layers": (200_000, "tensors"), "num_local_experts": (10**8, "tensors and rows")}


@pytest.mark.parametrize("field", _COUNTS)
def test_counts_that_the_files_do_not_hold(field, tmp_path):
    """No model is built, whose size would be that of the counts, not that of the files."""
    folder = float_checkpoint("mixtral", tmp_path / "float")
    convert_checkpoint(folder, tmp_path / "mx", of_weights("mxfp4"))
    count, what = _COUNTS[field]
    for one in (folder, tmp_path / "mx"):
        config = json.loads((one / "config.json").read_text())
        (one / "config.json").write_text(json.dumps({**config, field: count}))
    begin = time.process_time()
    for read in (_values, load_packed_model):
        with pytest.raises(MXError, match=rf"has {field} {count}, and the files hold \d+ {what}: fetch"):
            read(folder if read is _values else tmp_path / "mx")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size", "head_dim"])
def test_parameters_that_are_larger_than_the_files(field, llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4"))
    for folder, read in ((llama, _values), (tmp_path / "mx", load_packed_model)):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, field: 1 << 32}))
        with pytest.raises(MXError, match=r"gives .* the shape \(.*\), and the files hold \d+ values"):
            read(folder)


@pytest.mark.parametrize(
    ("key", "field"), [("block_count", "num_hidden_layers"), ("expert_count", "num_local_experts")]
)
def test_counts_that_a_gguf_file_does_not_hold(key, field, tmp_path):
    path = write_gguf(tiny_decoder("mixtral"), tmp_path / "model.gguf")
    content = path.read_bytes()
    at = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    path.write_bytes(content[:at] + (200_000).to_bytes(4, "little") + content[at + 4 :])
    begin = time.process_time()
    with pytest.raises(MXError, match=rf"has {field} 200000, and the files hold \d+ tensors.*: fetch"):
        open_gguf(path)
    assert time.process_time() - begin < 2


def test_the_files_of_other_models(llama, tmp_path):
    """Every tensor has the shape that the configuration gives it, quantized or not."""
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 301}))
    with pytest.raises(
        MXError, match=r"has (lm_head|model.embed_tokens).weight of shape \(300, 64\), its config.json of"
    ):
        convert_checkpoint(other, tmp_path / "out", of_weights("mxfp4"))
