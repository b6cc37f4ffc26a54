"""Matmuls that the global setting leaves in high precision."""

import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.analysis.agreement import fidelity
from tests.flow import exported
from tests.models import module_of

FP4 = MXQuantizationConfig(weight="mxfp4", activation="mxfp4")


class Fourier(nn.Module):
    """Random Fourier features of coordinates, as SAM embeds points."""

    def __init__(self, coordinates=2, parameter=False):
        super().__init__()
        matrix = 10 * torch.randn(coordinates, 32)
        self.matrix = nn.Parameter(matrix, requires_grad=False) if parameter else None
        if not parameter:
            self.register_buffer("constant", matrix)

    def forward(self, x):
        angles = 2 * math.pi * self.matmul(x, self.constant if self.matrix is None else self.matrix)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def matmul(self, x, matrix):
        return (2 * x - 1) @ matrix


class Einsum(Fourier):
    def matmul(self, x, matrix):
        return torch.einsum("bc,cf->bf", x, matrix)[:, None].expand(-1, 2, -1).flatten(1)


class Functional(Fourier):
    """A matmul as a linear layer with a buffer as its weight."""

    def __init__(self):
        super().__init__()
        self.constant = self.constant.t().contiguous()

    def matmul(self, x, matrix):
        return nn.functional.linear(2 * x - 1, matrix)


def net(features):
    return module_of(lambda self, x: self.fc(self.features(x)[:, :64]), features=features, fc=nn.Linear(64, 8))


def waves_of(layer, waves):
    """Return layers followed by sine and cosine, or matmuls followed by sine alone."""
    return module_of(lambda self, x: torch.cat([wave(self.layer(x)) for wave in waves], -1), layer=layer)


def matmul(rows):
    return module_of(lambda self, x: x @ self.matrix, matrix=nn.Parameter(torch.randn(rows, 8)))


def reasons(model, x, quantizer):
    prepared = pt2mx.prepare_pt2e(exported(model.eval(), x), quantizer)
    report = pt2mx.quantization_report(pt2mx.convert_pt2e(prepared))
    return [(o.operator, o.quantized, o.reason) for o in report.operators]


@pytest.mark.compiled_except("features0")
@pytest.mark.slow_except("features0", "features3")
@pytest.mark.parametrize("features", [Fourier(), Fourier(3), Fourier(parameter=True), Einsum(), Functional()])
def test_the_constant_matrix_of_fourier_features_is_excluded_unless_a_setting_names_it(features):
    torch.manual_seed(0)
    model, x = net(features), torch.rand(64, 3 if getattr(features, "constant", torch.ones(2)).shape[0] == 3 else 2)
    matmul, layer = reasons(model, x, MXQuantizer().set_global(FP4))
    assert not matmul[1] and layer == ("aten.linear", True, None)
    assert matmul[2].startswith("angles: sine and cosine use the matmul with the constant features_")
    assert reasons(model, x, MXQuantizer().set_global(FP4).set_small_weights(FP4, 4096))[0] == matmul
    graph = exported(model.eval(), x)
    for explicit in (
        MXQuantizer().set_global(FP4).set_module_name("features", FP4),
        MXQuantizer().set_global(FP4).set_module_type(type(features), FP4),
        MXQuantizer().set_global(FP4).set_operator_type(matmul[0], FP4),
    ):
        assert reasons(model, x, explicit)[0] == (matmul[0], True, None)
        named = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, explicit))
    by_default = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, MXQuantizer().set_global(FP4)))
    left, quantized = (fidelity([(m(x), graph(x))]).sqnr for m in (by_default, named))
    assert left > 10 > 4 > quantized  # dB: angles of several turns are lost


@pytest.mark.parametrize(
    "model, width",
    [
        (waves_of(nn.Linear(2, 8), (torch.sin, torch.cos)), 2),  # a layer's parameter
        (waves_of(matmul(32), (torch.sin, torch.cos)), 32),  # many rows
        (waves_of(matmul(2), (torch.sin, torch.relu)), 2),  # no angle
    ],
)
def test_other_matmuls_are_quantized(model, width):
    assert all(quantized for _, quantized, _ in reasons(model, torch.randn(4, width), MXQuantizer().set_global(FP4)))


class LowRank(nn.Module):
    def __init__(self, read_in_float=False):
        super().__init__()
        self.weight, self.read_in_float = nn.Parameter(torch.randn(64, 64)), read_in_float
        self.a, self.b = nn.Parameter(torch.randn(64, 4)), nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        update = self.a @ self.b
        y = nn.functional.linear(x, self.weight + update)
        return y + update[0] if self.read_in_float else y


def test_a_factor_of_a_weight_is_not_quantized_by_itself():
    torch.manual_seed(0)
    x, model = torch.randn(4, 64), LowRank()
    weight_only = MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4"))
    assert reasons(model, x, weight_only) == [("aten.linear", True, None)]  # conversion computes the matmul
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported(model, x), weight_only))
    whole = pt2mx.fake_quantize_mx((model.weight + model.a @ model.b).detach(), "mxfp4")
    assert torch.equal(converted(x), nn.functional.linear(x, whole))
    assert [quantized for _, quantized, _ in reasons(LowRank(True), x, weight_only)] == [True, True]
