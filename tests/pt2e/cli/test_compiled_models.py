import re

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, load_package
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.float_model import export
from pt2mx.pt2e.packages.compile import compile_program
from tests.models import module_of


def attention(self, x):  # (B, S, 64) -> (B, S, 64)
    """Attention whose probabilities and values are also quantized, along the sequence."""
    q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
    weights = torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, -1)
    return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.compiled
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("example", [4, 64])
def test_package_of_an_attention_takes_sequences_of_every_length(example, portable, quantize, tmp_path):
    torch.manual_seed(0)
    x, shapes = torch.randn(2, example, 64), ({1: torch.export.Dim("sequence", min=2, max=512)},)
    model = module_of(attention, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64)).eval()
    _, _, converted = quantize(export(model, (x,), shapes), MXQuantizer.from_recipe("mxfp8"), (x,))
    compile_program(export(converted, (x,), shapes), tmp_path / "net.pt2", portable=portable)
    package = load_package(tmp_path / "net.pt2")
    for length in (2, 17, 32, 33, 64, 70, 200):
        x = torch.randn(2, length, 64)
        with torch.no_grad():
            expected = converted(x)
        assert ((package(x) - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.compiled
def test_inputs_that_a_model_writes(tmp_path, monkeypatch, capsys):
    def forward(self, cache, x):
        cache.add_(self.linear(x))
        return cache * 2

    monkeypatch.chdir(tmp_path)
    args = torch.randn(4, 64), torch.randn(4, 64)
    model = module_of(forward, linear=nn.Linear(64, 64))
    prepared = pt2mx.prepare_pt2e(torch.export.export(model.eval(), args).module(), MXQuantizer.from_recipe("mxfp8"))
    program = torch.export.export(pt2mx.convert_pt2e(prepared), args)
    torch.export.save(program, "cached.pt2")
    assert main(["compile", "cached.pt2", "--output", "cached.aoti.pt2"]) == 0
    sqnr = re.search(r"SQNR (\S+) dB", capsys.readouterr().out)[1]
    assert float(sqnr) > 120
    assert main(["run", "cached.aoti.pt2", "--output", "out.pt"]) == 0
    cache, x = (t.clone() for t in program.example_inputs[0])
    assert torch.allclose(torch.load("out.pt"), program.module()(cache, x), atol=1e-5)
