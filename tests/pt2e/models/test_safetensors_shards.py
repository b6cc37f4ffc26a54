import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pt2mx import MXError
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.models import safetensors_shards
from pt2mx.pt2e.models.safetensors_shards import DTYPES, Entry, ShardReader, ShardWriter
from tests.damaged_files import damaged


def tensors():
    """Return tensors of each dtype, of odd shapes, a scalar and an empty one."""
    bits = torch.randint(0, 2, (3, 5), dtype=torch.uint8)
    return {
        **{name: bits.to(dtype, copy=True) for name, dtype in DTYPES.items() if name != "F8_E8M0"},
        "scales": bits.clone().view(torch.float8_e8m0fnu),
        "vector": torch.randn(7),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "deep": torch.randn(2, 3, 4).bfloat16(),
    }


@pytest.mark.parametrize("size", [1, 7, 16, 1 << 20])
def test_a_file_is_read_in_slices(tmp_path, monkeypatch, size):
    monkeypatch.setattr(safetensors_shards, "SLICE", size)
    save_file(tensors(), tmp_path / "a.safetensors", {"format": "pt", "by": "test"})
    with ShardReader(tmp_path / "a.safetensors") as reader:
        assert reader.metadata == {"format": "pt", "by": "test"}
        for name, tensor in load_file(tmp_path / "a.safetensors").items():
            parts = dict(reader.slices(name))
            assert reader.entries[name].dtype == tensor.dtype and reader.entries[name].shape == tuple(tensor.shape)
            if tensor.dim() and tensor.numel():
                assert torch.cat([part.view(torch.uint8) for part in parts.values()]).equal(tensor.view(torch.uint8))
                assert list(parts) == list(range(0, len(tensor), max(1, size // tensor[0].nbytes)))
            else:
                assert all(part.equal(tensor) for part in parts.values()) and len(parts) == tensor.numel()


def test_a_file_is_written_in_any_order(tmp_path):
    saved = tensors()
    entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in saved.items()}
    with whole_file(tmp_path / "a.safetensors") as file:
        writer = ShardWriter(file, entries, {"format": "pt"})
        for name, tensor in reversed(saved.items()):
            if tensor.dim() > 1:
                writer.write(name, 1, tensor[1:])
                writer.write(name, 0, tensor[:1])
            else:
                writer.write(name, 0, tensor)
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == saved.keys()
    for name, tensor in saved.items():
        same = read[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape and same, name


def test_bytes_are_those_that_safetensors_writes(tmp_path):
    saved = {"a": torch.randn(3, 5), "b": torch.ones(3, dtype=torch.uint8), "c": torch.ones(3).bfloat16()}
    save_file(saved, tmp_path / "theirs.safetensors", {"format": "pt"})
    with whole_file(tmp_path / "ours.safetensors") as file:
        entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in saved.items()}
        writer = ShardWriter(file, entries, {"format": "pt"})
        for name, tensor in saved.items():
            writer.write(name, 0, tensor)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "no whole file"),
        (b"{]", "no whole file"),
        (b"[]", "no whole file"),
        (
            b'{"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}12345678',
            "has a in a dtype that is not known",
        ),
        (b'{"a": {"shape": [2], "data_offsets": [0, 1]}}', "no whole file.*dtype"),
        (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', "no whole file"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [1, 1]}}', "no whole file"),
        (b'{"a": {"dtype": "U8", "shape": [0, %d], "data_offsets": [0, 0]}}' % (1 << 63), "which is too large"),
        (b'{"__metadata__": {"format": 1}}', "no whole file"),
        (b"[" * 100_000, "no whole file"),
    ],
)
def test_damaged_files(tmp_path, header, message):
    path = tmp_path / "a.safetensors"
    length = header.rindex(b"}") + 1 if header.endswith(b"12345678") else len(header)
    path.write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(MXError, match=message):
        ShardReader(path)


def _stored(path):
    """Return the dtype, the shape and the bytes of each tensor, and the metadata, as safetensors itself reads them."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        return {name: _facts(tensor) for name, tensor in tensors.items()}, file.metadata() or {}


def _facts(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_damaged_header_is_read_as_safetensors_reads_it(tmp_path):
    """safetensors accepts exactly the same files, with the same tensors."""
    path, accepted = tmp_path / "a.safetensors", 0
    few = {name: torch.randn(shape) for name, shape in {"a": (3, 4), "b": (4, 3), "c": (), "d": (0, 2)}.items()}
    save_file({**few, "e": torch.ones(12).half()}, path, {"format": "pt"})
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for damage in damaged(content, 0, end, 1000):
        path.write_bytes(damage)
        try:
            with ShardReader(path) as reader:
                read = {name: _facts(reader.tensor(name)) for name in reader.entries}, reader.metadata
        except MXError:
            with pytest.raises((SafetensorError, AttributeError, ValueError)):
                _stored(path)
        else:
            assert read == _stored(path)
            accepted += 1
    assert 10 < accepted < 100


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MXError, match=r"cannot read .*: No such file"):
        ShardReader(tmp_path / "a.safetensors")
