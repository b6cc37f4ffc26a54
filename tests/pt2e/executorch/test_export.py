"""Files of ExecuTorch. Tests that need executorch are slow, and run in an environment that has it: the one whose python
the variable PT2MX_EXECUTORCH_PYTHON names, or one that is made for them."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.cli.command import main
from tests.documents import ROOT, blocks
from tests.environments import python_with, run_python
from tests.pt2e.executorch.test_edge import converted_program

MISSING = importlib.util.find_spec("executorch") is None
PAGE = ROOT / "pt2e/executorch/README.md"
FACTORY = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).eval(), (torch.randn(4, 64),)
"""
#: each case prints its name and what came of it
CASES = """
import sys
import torch
from torch import nn
import pt2mx
from executorch.runtime import Runtime
from tests.pt2e.executorch.test_edge import BATCH, Net, converted_program

def run(name, program, *batches, **options):
    try:
        file = pt2mx.export_executorch(program, "net.pte", **options)
    except pt2mx.MXError as error:
        print(name, error)
        return
    method, module = Runtime.get().load_program("net.pte").load_method("forward"), program.module()
    for x in batches:
        with torch.no_grad():
            y, expected = method.execute([x])[0], module(x)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(), expected.nan_to_num()), name
    print(name, "equal", sorted({*file.backends}), file.size)

class After(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(64, 8), function

    def forward(self, x):
        return self.function(self.linear(x))

def linear(quantizer="mxfp8", function=lambda x: x, shapes=None):
    return converted_program(After(function).eval(), torch.randn(4, 64), quantizer, shapes)

torch.manual_seed(0)
ids = torch.randint(0, 50, (3, 12))
net = converted_program(Net().eval(), ids, "mxfp4_weights_mxfp8_activations", BATCH)
run("net", net, ids, ids[:1], ids.repeat(3, 1))
x = torch.randn(4, 64)
x[0, 3], x[1, 40], x[2, 0] = float("nan"), float("inf"), -0.0
x[3] *= 2.0**-127
config = pt2mx.get_default_mx_quantization_config
for activation in ("mxfp8_e5m2(rceil)", "mxint8(mse)", "mxfp6(even,half_away)"):
    run(activation, linear(pt2mx.MXQuantizer().set_global(config("mxfp6_e3m2", activation))), x)
run("xnnpack", linear(), x.nan_to_num(0, 0, 0), backend="xnnpack")
run("sort", linear(function=lambda x: x.sort()[0]))
unbounded = linear(shapes=({0: torch.export.Dim("batch")},))
run("unbounded", unbounded)
run("bounded", unbounded, x[:2], x.repeat(4, 1), max_size=16)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The python of an environment with executorch."""
    return python_with(("executorch",), "PT2MX_EXECUTORCH_PYTHON", tmp_path_factory.mktemp("executorch"))


@pytest.mark.slow
def test_the_runtime_gives_the_bits_of_the_program(python, tmp_path):
    (tmp_path / "cases.py").write_text(CASES)
    printed = dict(line.split(" ", 1) for line in run_python(python, "cases.py", cwd=tmp_path).splitlines())
    for name in ("net", "bounded", "mxfp8_e5m2(rceil)", "mxint8(mse)", "mxfp6(even,half_away)"):
        assert printed[name].startswith("equal [] ")
    assert printed["xnnpack"].startswith("equal ['XnnpackBackend'] ")
    assert printed["sort"].startswith("ExecuTorch's kernels lack aten::sort.values: the file would not load. Linear")
    assert re.match(r"the dynamic dimension s\d+ has no upper bound.*Dim\(\"batch\", max=64\)", printed["unbounded"])


@pytest.mark.slow
def test_the_commands_and_the_code_of_the_page_run(python, tmp_path):
    (tmp_path / "net.py").write_text(FACTORY)
    commands = re.findall("^pt2mx .+$", PAGE.read_text(), re.MULTILINE)
    program = "import sys; from pt2mx.pt2e.cli.command import main; sys.exit(main())"
    printed = [run_python(python, "-c", program, *line.split()[1:], cwd=tmp_path) for line in commands]
    written = (tmp_path / "net.pte").stat().st_size
    assert len(printed) == 2 and printed[1].startswith(f"net.pte: {written:,} bytes (the program: ")
    assert "ExecuTorch against the program: SQNR " in printed[1] and "cosine 1.000000" in printed[1]
    ((_, words, code),) = blocks(PAGE, "python")
    (tmp_path / "page.py").write_text(code)
    assert words == "executorch" and run_python(python, "page.py", cwd=tmp_path) == ""


@pytest.mark.skipif(not MISSING, reason="executorch is installed")
def test_without_executorch_the_error_names_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = converted_program(nn.Linear(64, 8).eval(), torch.randn(2, 64), "mxfp8")
    message = "executorch is not installed: pip install 'pt2mx[executorch]'"
    with pytest.raises(MXError) as error:
        pt2mx.export_executorch(program, "net.pte")
    assert str(error.value) == message and not list(Path().iterdir())
    pt2mx.save_program(program, "net.pt2")
    assert main(["export-executorch", "net.pt2", "--output", "net.pte"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"pt2mx: error: {message}"


def test_refuses_other_backends_and_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = converted_program(nn.Linear(64, 8).eval(), torch.randn(2, 64), "mxfp8")
    with pytest.raises(MXError, match="unknown backend 'xnpack': did you mean 'xnnpack'"):
        pt2mx.export_executorch(program, "net.pte", backend="xnpack")
    Path("net.py").write_text(FACTORY)
    pt2mx.save_program(program, "net.pt2")
    for arguments, message in (
        (["net.py", "--output", "net.pte"], "'net.py' is no PT2 archive: give what `pt2mx quantize`"),
        (["none.pt2", "--output", "net.pte"], "no file 'none.pt2'"),
        (["net.pt2", "--output", "net.pt"], "cannot write 'net.pt': its name must end in .pte"),
    ):
        assert main(["export-executorch", *arguments]) == 2
        assert message in capsys.readouterr().err
