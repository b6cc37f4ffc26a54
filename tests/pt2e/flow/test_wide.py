"""Block floating point and floats of up to 16 bits through the whole flow."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from tests.models import module_of


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.up, self.mix = nn.Embedding(10, 48), nn.Linear(48, 64), nn.Conv1d(64, 16, 3)
        self.head = nn.Linear(16, 5)

    def forward(self, ids, x):
        y = self.up(self.words(ids) + x).relu()
        return self.head(self.mix(y.transpose(1, 2)).transpose(1, 2))


def batch(*shape):
    return torch.randint(10, shape), torch.randn(*shape, 48)


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=4)}
    return torch.export.export(Model().eval(), batch(2, 7), dynamic_shapes=(shape, shape))


def quantizer(spelling):
    return MXQuantizer().set_global(MXQuantizationConfig(spelling, spelling, spelling, spelling))


@pytest.mark.parametrize(
    ("spelling", "error", "bits"), [("BFP[16|8]{32}", 1e-4, 16.3), ("BFP[12|8]{16}", 2e-3, 16.5), ("e5m10", 1e-3, 16.3)]
)
def test_prepare_and_convert(program, quantize, spelling, error, bits):
    args, other = batch(2, 7), batch(3, 11)
    expected, prepared, converted = quantize(program, quantizer(spelling), args)
    assert torch.equal(converted(*args), expected)
    assert 0 < (expected - program.module()(*args)).abs().max() < error
    with torch.no_grad():
        assert torch.equal(converted(*other), prepared(*other))
    assert converted.up.weight_data.shape == (64, 96)
    report = pt2mx.quantization_report(converted)
    assert report.operators[0].operands[0].spec == str(pt2mx.parse(spelling))
    assert report.effective_bits == pytest.approx(bits, abs=0.05) and report.bytes_after < report.bytes_before


@pytest.mark.compiled
def test_save_load_and_lower(quantize, tmp_path):
    args = (torch.randn(5, 40),)
    matmuls = module_of(
        lambda self, x: self.head(x @ self.weight), weight=nn.Parameter(torch.randn(40, 64)), head=nn.Linear(64, 8)
    )
    converted = quantize(torch.export.export(matmuls.eval(), args), quantizer("BFP[16|8]{32}"), args)[2]
    want, saved = converted(*args), torch.export.export(converted, args)
    for form in (saved, pt2mx.make_portable(saved)):
        torch.export.save(form, tmp_path / "model.pt2")
        assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(*args), want)
    lowered = pt2mx.lower_to_inductor(converted)
    assert lowered.weight_data_t.shape == (64, 80) and lowered.head.weight_data.shape == (8, 128)
    assert torch.allclose(lowered(*args), want, atol=1e-4)


def test_training_in_a_wide_format(program):
    student = torch.export.export(Model().train(), batch(2, 7)).module()
    config = MXQuantizationConfig(activation="BFP[16|8]{32}", weight="BFP[12|8]{32}")
    qat = pt2mx.prepare_qat_pt2e(student, MXQuantizer().set_global(config))
    args = batch(2, 7)
    qat(*args).square().mean().backward()
    assert qat.up.weight.grad.abs().max() > 0
    with torch.no_grad():
        assert torch.equal(pt2mx.convert_pt2e(qat)(*args), qat.eval()(*args))
