import struct

import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.models.gguf_file import GGUFFile
from tests.gguf_files import finish

gguf = pytest.importorskip("gguf")

#: types that gguf quantizes and dequantizes
_TYPES = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
#: types whose bytes are random, since gguf only dequantizes them
_DEQUANTIZED = ("NVFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def _tensors():
    """Return the bytes of a tensor of two rows in each type."""
    values = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).numpy()
    tensors = {name: gguf.quantize(values, gguf.GGMLQuantizationType[name]) for name in _TYPES}
    for name in _DEQUANTIZED:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        bits = torch.randint(
            48, (2, 256 // block * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        tensors[name] = bits.numpy()
    return {**tensors, "F16": values.astype(np.float16), "F32": values}


@pytest.fixture
def path(tmp_path):
    """A file of every value type and many tensor types, written by gguf."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for kind, value in {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 1 << 31, "int32": -70000,
                        "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True,
                        "string": "é"}.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.floats", [0.25, 2.0])
    writer.add_array("test.strings", ["a", "", "ü"])
    for name, tensor in _tensors().items():
        writer.add_tensor(name, tensor, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.add_tensor("experts", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    finish(writer)
    return tmp_path / "model.gguf"


def test_metadata(path):
    metadata = GGUFFile(path).metadata
    assert {key.removeprefix("test."): value for key, value in metadata.items() if key.startswith("test.")} == {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 1 << 31, "int32": -70000, "uint64": 1 << 63,
        "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True, "string": "é", "numbers": [1, 2, 3],
        "floats": [0.25, 2.0], "strings": ["a", "", "ü"],
    }  # fmt: skip
    assert GGUFFile(path).text("general.architecture") == "llama"
    with pytest.raises(MXError, match=r"has no string test.int8 in its metadata"):
        GGUFFile(path).text("test.int8")


def test_values_have_the_bits_of_gguf(path):
    file = GGUFFile(path)
    assert file.entries["experts"].shape == (2, 3, 4)
    assert torch.equal(file.values("experts"), torch.arange(24.0).view(2, 3, 4))
    for name, tensor in _tensors().items():
        expected = gguf.dequantize(tensor, gguf.GGMLQuantizationType[name])
        values = file.values(name)
        assert values.shape == (2, 256) and values.dtype == {"F16": torch.half, "BF16": torch.bfloat16}.get(
            name, torch.float
        )
        assert np.array_equal(values.float().numpy().view(np.int32), expected.view(np.int32)), name


def test_blocks_are_views_of_the_file(path):
    before = path.read_bytes()
    file = GGUFFile(path)
    blocks = file.blocks("MXFP4")
    assert torch.equal(blocks, torch.from_numpy(_tensors()["MXFP4"]))
    assert blocks.untyped_storage().data_ptr() == file.blocks("Q8_0").untyped_storage().data_ptr()
    blocks.fill_(0)
    assert path.read_bytes() == before


def test_files_that_are_no_gguf(tmp_path):
    for content, message in {
        b"": "cannot read|is no GGUF file",
        b"GG": "is no GGUF file",
        b"safetensors" * 10: "begins with b'safe', not with b'GGUF': it is no GGUF file",
        b"GGUF": "ends within its header, at 4 bytes: fetch it again",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0): "is of version 1: give a little-endian file of version 2 or 3",
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0): "is big-endian, version 3",
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0): "ends within its header",
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 13): "k in .* has a value of the unknown type 13",
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 61): "ends within its header",
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 0): "k in .* has a value of the unknown type 9",
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"w", 9): "w in .* has 9 dimensions",
    }.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(MXError, match=message) as error:
            GGUFFile(tmp_path / "file")
        assert "\n" not in str(error.value)
    with pytest.raises(MXError, match=r"^cannot read .*missing"):
        GGUFFile(tmp_path / "missing")


def test_truncated_anywhere(path, tmp_path):
    """No prefix of a file is taken for a file, and each error is one of ours."""
    content = path.read_bytes()
    end = max(entry.begin + entry.nbytes for entry in GGUFFile(path).entries.values())
    for size in (*range(0, 1200, 37), end // 2, end - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(MXError, match=r"truncated|ends within its header|is no GGUF file|cannot read"):
            GGUFFile(tmp_path / "cut")


def _with_tensor(path, name=b"w", dims=(32,), kind=0, offset=0, data=128, metadata=b"", values=0, count=1):
    entry = struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, len(dims), *dims, kind, offset)
    header = b"GGUF" + struct.pack("<IQQ", 3, count, values) + metadata + entry * count
    path.write_bytes(header + b"\0" * (-len(header) % 32) + b"\0" * data)


def test_tensors_that_do_not_fit(tmp_path):
    path = tmp_path / "file"
    _with_tensor(path)
    assert GGUFFile(path).entries["w"].nbytes == 128
    alignment = struct.pack("<Q17sII", 17, b"general.alignment", 4, 12)
    split = struct.pack("<Q11sIH", 11, b"split.count", 2, 3)
    for changes, message in (
        ({"kind": 77}, "^w in .* has the unknown type 77: install a newer gguf"),
        ({"kind": 4}, "^w in .* has the unknown type 4:"),
        (
            {"dims": (33,), "kind": 39},
            r"^w in .* is \(33,\): its rows must be whole blocks of MXFP4, of 32 values",
        ),
        ({"dims": (32, 0)}, r"^w in .* is \(0, 32\): its rows must be whole blocks of F32, of 1 values"),
        (
            {"offset": 32},
            "^w in .* has its bytes at 96 to 224, the tensor before it ends at 64, the file at 192: it is truncated or",
        ),
        ({"data": 160}, "has its last tensor end at 192, and ends at 224: it is damaged, fetch it again"),
        ({"offset": 1}, "it is truncated or damaged"),
        ({"dims": (1 << 40, 1 << 20)}, "it is truncated or damaged"),
        ({"count": 2}, "holds w twice"),
        ({"metadata": alignment, "values": 1}, "has general.alignment 12: it must be a power of two, at least 8"),
        ({"metadata": split, "values": 1}, "is one of 3 files of a model: merge them with `llama-gguf-split --merge`"),
    ):
        _with_tensor(path, **changes)
        with pytest.raises(MXError, match=message):
            GGUFFile(path)


def test_a_type_that_gguf_cannot_dequantize(tmp_path):
    _with_tensor(tmp_path / "file", dims=(256,), kind=gguf.GGMLQuantizationType.Q8_K, data=292)
    with pytest.raises(
        MXError, match=r"^w is Q8_K, which gguf cannot dequantize: convert the file with `llama-quantize"
    ):
        GGUFFile(tmp_path / "file").values("w")
