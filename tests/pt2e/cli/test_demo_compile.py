from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.pt2e.cli import demo_compile


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A float program and a quantized one; their inputs replace MiniLM's."""
    torch.manual_seed(0)
    encoder, x = Encoder().eval(), torch.randn(72, 64)
    exported = torch.export.export(encoder, (x,))
    prepared = pt2mx.prepare_pt2e(exported.module(), pt2mx.MXQuantizer.from_recipe("mxfp8"))
    pt2mx.save_program(exported, tmp_path / "float.pt2")
    pt2mx.save_program(torch.export.export(pt2mx.convert_pt2e(prepared), (x,)), tmp_path / "mxfp8.pt2")
    monkeypatch.setattr(demo_compile, "load_minilm", lambda: (encoder, lambda texts: (x,)))
    return tmp_path


@pytest.mark.parametrize(
    ("seconds", "speed"), [(2.0, "2.0x faster than"), (1.02, "about as fast as"), (0.8, "1.2x slower than")]
)
def test_the_speed_in_words(seconds, speed, folder, monkeypatch, capsys):
    compilation = demo_compile.Compilation(folder, "mxfp8")
    finished, begun = SimpleNamespace(communicate=lambda: ("", ""), returncode=0), []
    monkeypatch.setattr(demo_compile.subprocess, "Popen", lambda command, **options: begun.append(command) or finished)
    for recipe in ("mxfp4_weight_only", "mxfp8"):
        compilation.begin(recipe)
    assert [command[1:4] for command in begun] == [["-m", "pt2mx", "compile"]]
    times = iter((1.0, 9.0, seconds))  # of the package, of its program, of the float program
    monkeypatch.setattr(demo_compile, "load_package", lambda path: None)
    monkeypatch.setattr(demo_compile, "_timed", lambda model, inputs: (torch.ones(1, 4), next(times)))
    assert compilation.finish() == {"cosine": 1.0, "faster": seconds}
    assert capsys.readouterr().out == f"\nmxfp8 compiled: cosine 1.000000 to the program, {speed} the float program\n"


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_the_package_agrees_with_its_program(folder, capsys):
    compilation = demo_compile.Compilation(folder, "mxfp8")
    compilation.begin("mxfp8")
    figures = compilation.finish()
    assert figures["cosine"] > 0.9999 and figures["faster"] > 0
    assert f"mxfp8 compiled: cosine {figures['cosine']:.6f} to the program, " in capsys.readouterr().out
    assert (folder / "mxfp8.aoti.pt2").is_file()


def test_a_program_that_cannot_be_compiled(folder, capsys):
    (folder / "mxfp8.pt2").write_bytes(b"no program")
    compilation = demo_compile.Compilation(folder, "mxfp8")
    compilation.begin("mxfp8")
    assert compilation.finish() is None
    assert "mxfp8 was not compiled: pt2mx: error: " in capsys.readouterr().out
