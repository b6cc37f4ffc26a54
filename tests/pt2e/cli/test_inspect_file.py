"""`pt2mx inspect`: its output for programs and folders; test_compile.py has packages."""

import json
import zipfile
from math import prod

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, packed_weights
from pt2mx.pt2e.cli import command
from pt2mx.pt2e.inspect.inspect_file import _called_weight, inspect_file
from pt2mx.pt2e.inspect.schema import TensorInfo, _histogram
from tests.flow import convert
from tests.language_models import quantized_decoder, tokenizer_of_bytes
from tests.models import module_of

BATCH = ({0: torch.export.Dim("batch", max=64)},)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 10)).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A program, its portable form, and a float one."""
    folder, x = tmp_path_factory.mktemp("files"), torch.randn(8, 64)
    quantizer = MXQuantizer.from_recipe("mxfp4")
    program = torch.export.export(convert(mlp(), (x,), quantizer, shapes=BATCH), (x,), dynamic_shapes=BATCH)
    pt2mx.save_program(program, folder / "program.pt2", quantizer)
    torch.export.save(pt2mx.make_portable(program), folder / "portable.pt2")
    torch.export.save(torch.export.export(mlp(), (x,)), folder / "float.pt2")
    return folder, program


def run(*arguments, capsys):
    assert command.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr()


@pytest.mark.compiled
def test_a_program(files, capsys):
    folder, program = files
    (result,) = json.loads(run(folder / "program.pt2", "--json", capsys=capsys).out)["files"]
    assert result["kind"] == "program" and result["bytes"] == (folder / "program.pt2").stat().st_size
    assert result["origin"]["pt2mx"] == pt2mx.__version__ and "mxfp4_e2m1{32}" in result["origin"]["recipe"]
    assert result["inputs"] == [{"name": "input", "dtype": "float32", "shape": ["0..64", 64], "bytes": None}]
    assert result["activations"] == {"mxfp4_e2m1{32}(even,even)": 2}
    assert result["operators"]["pt2mx.dequantize_mx"] == 4 and result["operators"]["aten.linear"] == 2
    assert {t["name"]: t["bytes"] for t in result["tensors"]} == {"0.bias": 1000, "2.bias": 40}
    for weight, held in zip(packed_weights(program), result["weights"], strict=True):
        assert (held["name"], held["format"]) == (weight.name, "fp4_e2m1{32}")
        assert (held["axis"], tuple(held["shape"])) == (1, weight.shape)
        assert held["bytes"] == weight.codes.numel() + weight.scales.numel()
        assert held["bits"] == 8 * held["bytes"] / prod(weight.shape)
        exponents = weight.scales.flatten().int() - 127
        assert held["scales"] == {str(e): int((exponents == e).sum()) for e in exponents.unique().tolist()}
        assert sum(held["scales"].values()) == weight.scales.numel() and held["nan_blocks"] == 0


def test_the_table(files, capsys):
    lines = run(files[0] / "program.pt2", capsys=capsys).out.splitlines()
    assert lines[0].endswith(f"written by pt2mx {pt2mx.__version__} and torch {torch.__version__}")
    assert "inputs: input float32 (0..64, 64)" in lines
    (row,) = [line.split() for line in lines if line.startswith("0.weight")]
    assert row[:2] == ["0.weight", "fp4_e2m1{32}"] and row[-4:] == ["250x64", "1", "8,500", "4.25"]
    assert ["pt2mx.quantize_mx", "2"] in [line.split() for line in lines]
    assert lines[-1].startswith("2 packed weights: 18,500 values, 9,830 bytes, 4.25 bits a value; 2 other tensors")


def test_other_scales(tmp_path, capsys):
    quantizer = MXQuantizer().set_global(pt2mx.MXQuantizationConfig("nvfp4", "nvfp4", tensor_scale="dynamic"))
    x = torch.randn(8, 64)
    program = torch.export.export(convert(mlp(), (x,), quantizer), (x,))
    pt2mx.save_program(program, tmp_path / "program.pt2")
    (result,) = json.loads(run(tmp_path / "program.pt2", "--json", capsys=capsys).out)["files"]
    assert result["activations"] == {"nvfp4_e2m1{16}": 2} and len(result["tensors"]) == 2
    for weight, held in zip(packed_weights(program), result["weights"], strict=True):
        assert held["format"] == "nvfp4_e2m1{16}" and held["bytes"] == weight.codes.nbytes + weight.scales.nbytes + 4
        scales = weight.scales.view(torch.float8_e4m3fn).float() * weight.tensor_scale
        exponents = scales.log2().floor().int().flatten()
        assert held["scales"] == {str(e): int((exponents == e).sum()) for e in exponents.unique().tolist()}
    lines = run(tmp_path / "program.pt2", capsys=capsys).out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("0.weight")]
    assert row[:2] == ["0.weight", "nvfp4_e2m1{16}"] and row[-4:] == ["250x64", "1", "9,004", "4.50"]


def test_weights_of_more_bits_than_their_formats(tmp_path, capsys):
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, groups=32)).eval()
    x = torch.randn(2, 32, 8, 8)
    pt2mx.save_program(torch.export.export(convert(model, (x,), "mxfp4"), (x,)), tmp_path / "program.pt2")
    lines = run(tmp_path / "program.pt2", capsys=capsys).out.splitlines()
    reason = "8 bits a value: blocks of only 3 values, each with a scale and whole bytes of its own"
    assert lines[-3] == f"{reason}: 0.weight, 2.weight"
    (result,) = json.loads(run(tmp_path / "program.pt2", "--json", capsys=capsys).out)["files"]
    assert [weight["storage"] for weight in result["weights"]] == [reason, None, reason]


def test_programs_without_packed_weights(files, capsys):
    captured = run(files[0] / "portable.pt2", capsys=capsys)
    assert "portable: operators are written out" in captured.out
    assert "was written by" not in captured.out
    (result,) = json.loads(run(files[0] / "float.pt2", "--json", capsys=capsys).out)["files"]
    assert (result["weights"], result["origin"], result["portable"]) == ([], None, False)
    assert {t["name"] for t in result["tensors"]} == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.compiled
def test_an_onnx_file(files, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    folder, program = files
    for target in ("pt2mx", "openvino"):
        pt2mx.export_onnx(program, tmp_path / f"{target}.onnx", target=target)
    mine, other = (
        json.loads(run(tmp_path / f"{target}.onnx", "--json", capsys=capsys).out)["files"][0]
        for target in ("pt2mx", "openvino")
    )
    (expected,) = json.loads(run(folder / "program.pt2", "--json", capsys=capsys).out)["files"]
    assert (mine["kind"], mine["weights"]) == ("ONNX model", expected["weights"])
    assert mine["activations"] == expected["activations"] and mine["operators"]["pt2mx.DequantizeMX"] == 2
    assert mine["inputs"][0]["dtype"] == "float32" and mine["inputs"][0]["shape"][1] == 64
    assert {t["name"]: t["bytes"] for t in mine["tensors"]} == {"0.bias": 1000, "2.bias": 40}
    assert not other["weights"] and len(other["tensors"]) > 2
    assert "a ONNX" not in run(tmp_path / "pt2mx.onnx", capsys=capsys).out


def test_a_package_without_inputs(tmp_path):
    """As those of a language model."""
    with zipfile.ZipFile(tmp_path / "token.cpu.aoti.pt2", "w") as archive:
        archive.writestr("token/data/aotinductor/model/code.wrapper.cpp", "")
    (info,) = inspect_file(tmp_path / "token.cpu.aoti.pt2")
    assert (info.kind, info.inputs, info.weights) == ("package", (), ())


@pytest.mark.compiled
def test_the_folder_of_a_language_model(tmp_path, capsys):
    """Experts are weights with three dimensions."""
    model = quantized_decoder("mixtral", MXQuantizer.from_recipe("mxfp4_weight_only"), num_hidden_layers=1)
    model.tokenizer = tokenizer_of_bytes()
    model.save_pretrained(tmp_path / "model")
    (result,) = inspect_file(tmp_path / "model")
    assert result.file.endswith("program.pt2") and len(result.weights) > 4
    assert any(weight.name.endswith("gate_up_proj") and len(weight.shape) == 3 for weight in result.weights)
    assert all(weight.bits < 5 for weight in result.weights)
    assert f"{len(result.weights)} packed weights" in run(tmp_path / "model", capsys=capsys).out


def test_bad_input(tmp_path, capsys):
    (tmp_path / "text.pt2").write_text("no archive")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("none.pt2", "no file"),
        ("text.pt2", "is no PT2 archive"),
        ("folder", "holds no program.pt2: give a file"),
    ):
        assert command.main(["inspect", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("pt2mx: error: ") and captured.err.count("\n") == 1
        assert message in captured.err


@pytest.mark.parametrize("arguments", [("inspect",), ("generate", "--prompt", "a")])
def test_a_checkpoint_is_told_how_it_becomes_a_program(arguments, tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    name, *options = arguments
    assert command.main([name, str(tmp_path), *options]) == 2
    assert f"; `pt2mx quantize --model hf:{tmp_path}` makes one of a checkpoint\n" in capsys.readouterr().err


def test_histograms():
    assert _histogram({-3: 8, -1: 1}) == "-3 █ ▁ -1"
    assert _histogram({0: 5}) == "0 █ 0" and _histogram({}) == ""
    wide = _histogram(dict.fromkeys(range(-127, 128), 1))
    assert wide.startswith("-127 █") and wide.endswith(" 127") and len(wide) < 40


OPERATOR = """
import torch

@torch.library.custom_op("{0}::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@twice.register_fake
def _(x):
    return torch.empty_like(x)
"""


def test_a_program_with_a_custom_operator(tmp_path, capsys):
    name, path = "pt2mx_test_import", str(tmp_path / "twice.pt2")
    with torch.library._scoped_library(name, "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", torch.empty_like, "Meta")
        twice = module_of(lambda self, x: torch.ops.pt2mx_test_import.twice(x))
        torch.export.save(torch.export.export(twice, (torch.ones(2),)), path)
    assert command.main(["inspect", path]) == 2
    error = capsys.readouterr().err
    assert f"calls the operator {name}::twice, which nothing defines here" in error and error.count("\n") == 1
    (tmp_path / "my_operators.py").write_text(OPERATOR.format(name))
    out = run(path, "--import", tmp_path / "my_operators.py", capsys=capsys).out
    assert f"{name}.twice" in out
    assert command.main(["inspect", path, "--import", "none.py"]) == 2
    assert "--import 'none.py' is no Python file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operator", "fields", "expected"),
    [
        ("linear_mx", {}, "fp4_e2m1{32}"),
        ("linear_mx", {"block_size": {"as_int": 16}, "scale_format": {"as_string": "e4m3"}}, "fp4_e2m1{16}(e4m3)"),
        ("linear_mx_mma_layout", {"n": {"as_int": 4}}, None),
    ],
)
def test_weights_that_machine_code_multiplies(operator, fields, expected):
    """Codes in the MMA layout have another shape, and no operator says their blocks."""
    constants = {"w": TensorInfo("0.weight_data", "uint8", (4, 32), 128), "s": TensorInfo("s", "uint8", (4, 2), 8)}
    weight = {"weight_data": {"as_tensor": {"name": "w"}}, "weight_scale": {"as_tensor": {"name": "s"}}}
    said = {**weight, "elem_dtype_name": {"as_string": "fp4_e2m1"}, "block_size": {"as_int": 32}, **fields}
    inputs = [{"name": name, "arg": value} for name, value in said.items()]
    found = _called_weight({"target": f"pt2mx::{operator}", "inputs": inputs}, constants)
    assert (found and (found[0].name, found[0].format, found[0].shape, found[0].bytes)) == (
        expected and ("0.weight", expected, (4, 64), 136)
    )
