"""What the command line refuses before its work, most of it before torch is imported."""

import os
import subprocess
import sys
from zipfile import ZipFile

import pytest

from pt2mx import MXError
from pt2mx.pt2e.cli.checks import check_folder_name, check_program_name, check_usage
from pt2mx.pt2e.cli.command import command_parser, main
from pt2mx.pt2e.models.names import check_model, source_file

#: a wrong command line -> the begin of its error
WRONG = {
    "quantize --model minilm --recipe decoder_balancd": "no recipe 'decoder_balancd': no file, shipped recipe or "
    "format: did you mean 'decoder_balanced'?",
    "quantize --model minilm --recipe mxpf8": "no recipe 'mxpf8': no file, shipped recipe or format: did you mean "
    "'mxfp8'?",
    "quantize --model minilm --recipe mxfp8_e4m4": "no recipe 'mxfp8_e4m4': no file, shipped recipe or format: did you "
    "mean 'mxfp8_e4m3'?",
    "quantize --model minilm --recipe nvfp4_weigth_only": "no recipe 'nvfp4_weigth_only': no file, shipped recipe or "
    "format: did you mean 'nvfp4_weight_only'?",
    "quantize --model minilm --recipe nvpf4": "no recipe 'nvpf4': no file, shipped recipe or format: did you mean "
    "'nvfp4'?",
    "quantize --model minilm": "give --recipe, a YAML file, a format, or one of asr_balanced, ",
    "quantize --model minilmm --recipe mxfp8": "unknown model 'minilmm': did you mean 'minilm'?",
    "quantize --model net.py --recipe mxfp8": "the model 'net.py' names no function: give net.py:FACTORY",
    "compare net": "unknown model 'net': ",
    "compare minilm --dtype bfloat16": "--dtype is for checkpoints (hf:NAME), and 'minilm' is none",
    "quantize --model net.py:make --recipe mxfp8 --part net": "--part is for checkpoints (hf:NAME), and 'net.py:make'",
    "run none.pt2": "no file 'none.pt2': give what `pt2mx compile` wrote",
    "run net.pt2 --runtime openvino": "--runtime is for ONNX files: leave it out for a package",
    "compile none.pt2": "no file 'none.pt2': give what `pt2mx quantize` or torch.export.save wrote",
    "export-onnx . --output a.onnx --opset 17": "--opset 17 must be an integer from 18 to 25",
    "export-onnx . --output a.pt2": "cannot write 'a.pt2': its name must end in .onnx",
    "export-executorch . --output a.onnx": "cannot write 'a.onnx': its name must end in .pte",
    "export-executorch . --output a.pte --max-size 1": "--max-size 1 must be an integer of at least 2",
    "generate nowhere --dtype bfloat16": "--dtype is for the checkpoint of --float: give it, too",
    "perplexity nowhere --text a --recipe mxfp8 mxfp44": "no recipe 'mxfp44'",
    "quantize --model minilm --recipe mxfp8 --calibration no": "no file or folder 'no': give a folder of batches",
    "quantize --model hf:a/b --recipe mxfp8 --output o --distill . --distill-lr nan": "--distill-lr nan must be a "
    "finite number above 0",
    "quantize --model hf:a/b --recipe mxfp8 --output o --distill . --distill-warmup -1": "--distill-warmup -1 must "
    "be at least 0",
    "quantize --model hf:a/b --recipe mxfp8 --output o --distill-lr 1": "--distill-lr says how --distill trains",
    "quantize --model hf:a/b --recipe mxfp8 --output o --distill-generated": "--distill-generated says how --distill",
    "quantize --model hf:a/b --recipe mxfp8 --output o --distill . --tensor-parallel 2": "--distill trains a whole",
    "quantize --model hf:a/b --recipe mxfp8 --output o --distill no": "no file or folder 'no': give a text file",
    "quantize --model none.py:make --recipe mxfp8": "no file 'none.py': give module.py:factory",
    "quantize --model hf:./no --recipe mxfp8": "no file or folder './no': give a checkpoint's folder, a GGUF file, or",
    "quantize --model hf:no.gguf --recipe mxfp8": "no file or folder 'no.gguf': give a checkpoint's folder",
    "sensitivity minilm --calibration no": "no file or folder 'no': give a folder of batches",
    "generate no": "no file or folder 'no': give the folder that `pt2mx quantize` wrote",
    "generate . --prompt-file . --prompt-file no": "no file or folder 'no': give a file with a prompt",
    "generate . --prompt a --float a/b/c": "no file or folder 'a/b/c': give a checkpoint's folder, a GGUF file, or",
    "perplexity a --text no": "no file or folder 'no': give a text file, or a folder of .txt files",
    "inspect none.pt2": "no file or folder 'none.pt2': give a program, a package, an ONNX file",
    "convert-checkpoint no o": "no file or folder 'no': give the folder of a checkpoint, or a GGUF file",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_lines(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").touch()
    with pytest.raises(MXError) as error:
        check_usage(command_parser().parse_args(line.split()))
    assert str(error.value).startswith(WRONG[line])


@pytest.mark.parametrize(
    "line",
    [
        "quantize --model minilm --recipe MXFP8",
        "quantize --model minilm --recipe BFP[8|8]{64}(SN)",
        "quantize --model net.py:make --recipe fp6_e3m2{16}",
        "quantize --model onnx:net.onnx --recipe nvfp4 --output mx.onnx",
        "quantize --model hf:nowhere",
        "sensitivity hf:nowhere --dtype bfloat16 --part decoder",
        "perplexity nowhere --text .",
        "convert-checkpoint . b",
        "recipes check mxfp4",
        "run net.onnx --inputs batch.npz",
        "generate . --temperature 0.5 --top-p 1 --top-k 1",
        "export-onnx . --output a.onnx --opset 18 --target openvino",
    ],
)
def test_right_lines(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("net.onnx", "net.py", "batch.npz"):
        (tmp_path / name).touch()
    check_usage(command_parser().parse_args(line.split()))


@pytest.mark.parametrize(
    "line",
    [
        "quantize --model minilm --recipe mxfp44",
        "run none.pt2",
        "generate x --seed -1e9",
        "export-onnx . --output a.onnx --opset 17",
    ],
)
def test_torch_is_not_imported(line, tmp_path):
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['pt2mx', *{line.split()}]; import pt2mx"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.startswith("pt2mx: error: ")
    assert result.stderr.count("\n") == 1 and "torch" not in result.stderr


def test_models():
    assert source_file("a/net.py:make") == "a/net.py" and source_file("minilm") is None
    for source in ("minilm", "hf:x", "hf:org/x", "torchvision:resnet18", "onnx:a.onnx", f"{__file__}:make"):
        check_model(source)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")


@pytest.mark.parametrize("name", ["a.pt2", "A.PT2", "there/a.b.pt2", os.devnull])
@pytest.mark.usefixtures("folder")
def test_names_of_programs(name):
    check_program_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.onnx",
            r"its name must end in \.pt2; `pt2mx export-onnx` makes a \.onnx file of what `pt2mx quantize` wrote",
        ),
        ("a.safetensors", r"its name must end in \.pt2; `pt2mx save-checkpoint` makes"),
        ("a.pt", r"its name must end in \.pt2$"),
        ("a", r"its name must end in \.pt2$"),
        ("pt2", r"its name must end in \.pt2$"),
        ("there", "it must be a file"),
        ("nowhere/a.pt2", "a folder that exists"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_names_that_are_none_of_a_program(name, message):
    with pytest.raises(MXError, match=message):
        check_program_name(name)


@pytest.mark.parametrize("name", ["new", "there", "llama-3.1", "a.b/"])
@pytest.mark.usefixtures("folder")
def test_names_of_folders(name):
    check_folder_name(name, "checkpoint")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.onnx", r"'a\.onnx' has the name of a file: a language model is written to a folder; `pt2mx export-onnx`"),
        ("a.safetensors", "has the name of a file: .*; `pt2mx save-checkpoint` makes"),
        ("a.GGUF", "has the name of a file: a language model is written to a folder$"),
        ("file", "is a file"),
        ("./there/../checkpoint", "is the folder of the checkpoint"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_names_that_are_none_of_a_folder(name, message):
    with pytest.raises(MXError, match=message):
        check_folder_name(name, "checkpoint")


@pytest.mark.usefixtures("folder")
def test_outputs_of_a_package_are_torchs(capsys):
    with ZipFile("a.pt2", "w") as archive:
        archive.writestr("a/data/aotinductor/model", "")
    assert main(["run", "a.pt2", "--output", "a.npz"]) == 2
    assert "cannot write 'a.npz': its name must end in .pt or .pth" in capsys.readouterr().err
