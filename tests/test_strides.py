"""Models that read memory by its strides: quantized ones have the strides of float ones at every stage of the flow."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, lower_to_inductor
from tests.compare import sqnr
from tests.flow import reloaded
from tests.models import module_of

LAST = torch.channels_last


def after(layer, read):
    """A layer, and what reads its result."""
    return module_of(lambda self, *inputs: read(self.layer(*inputs)), layer=layer)


def flat(x):
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1])


def sums():
    def forward(self, x):
        return flat(self.left(x) * self.right(x) + self.left(x))

    return module_of(forward, left=nn.Conv2d(8, 6, 1), right=nn.Conv2d(8, 6, 1))


def transposed():
    """A matmul with a transposed parameter, which is read in its order in memory."""

    def forward(self, x):
        return x @ self.weight, self.weight.as_strided((1920,), (1,)).sum()

    return module_of(forward, weight=nn.Parameter(torch.randn(40, 48).t()))


def strided(x):
    return x.as_strided((2, 5, 5, 6), (150, 30, 6, 1))


def images(memory_format=LAST):
    return (torch.randn(2, 8, 5, 5).contiguous(memory_format=memory_format),)


def conv(memory_format=torch.contiguous_format):
    return nn.Conv2d(8, 6, 3, padding=1).to(memory_format=memory_format)


def encoder():
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()


def as_complex(x):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * 1j)


#: name -> (model, inputs, recipe, whether to decompose it first)
CASES = {
    "as_strided": lambda: (after(conv(), strided), images(), "mxfp8", False),
    "view": lambda: (after(conv(), flat), images(), "mxfp8", False),
    "view, weights only": lambda: (after(conv(), flat), images(), "mxfp4_weight_only", False),
    "view, model with channels last": lambda: (
        after(conv(LAST), flat),
        images(torch.contiguous_format),
        "mxfp4",
        False,
    ),
    "view, both with channels last": lambda: (after(conv(LAST), flat), images(), "mxfp6", False),
    "encoder, decomposed": lambda: (encoder(), (torch.randn(2, 7, 32),), "mxfp8", True),
    "complex": lambda: (after(nn.Linear(16, 32), as_complex), (torch.randn(3, 16),), "mxint8", False),
    "sums and products": lambda: (sums(), images(), "mxfp8", False),
    "transposed weight": lambda: (transposed(), (torch.randn(3, 48),), "mxfp8", False),
}


@pytest.fixture
def stages(quantize):
    """name -> (the float model, its inputs, what the prepared model gives, the converted one)."""

    def run(name):
        torch.manual_seed(0)
        model, inputs, recipe, decompose = CASES[name]()
        program = torch.export.export(model.eval(), inputs)
        quantizer = MXQuantizer.from_recipe(recipe)
        if name == "sums and products":
            config = MXQuantizationConfig(activation="mxfp8")
            quantizer.set_operator_type("aten.add", config).set_operator_type("aten.mul", config)
        prepared, _, converted = quantize(program.run_decompositions({}) if decompose else program, quantizer, inputs)
        return model, inputs, prepared, converted

    return run


def leaves(x):
    return list(x) if isinstance(x, tuple) else [x]


def equal(got, want):
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(leaves(got), leaves(want), strict=True))


@pytest.mark.compiled_except("view, weights only")
@pytest.mark.slow_cases(
    "encoder, decomposed",
    "sums and products",
    "view",
    "transposed weight",
    "view, both with channels last",
    "view, model with channels last",
)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_stage(name, stages):
    """Prepared, converted, exported again, saved, and portable give the same numbers with the float model's strides."""
    model, inputs, prepared, converted = stages(name)
    want = model(*inputs)
    for got, float_value in zip(leaves(prepared), leaves(want), strict=True):
        assert got.stride() == float_value.stride()
        assert sqnr(got, float_value) > 12
    assert equal(converted(*inputs), prepared)
    again = torch.export.export(converted, inputs)
    portable = pt2mx.make_portable(again)
    for program in (again, portable):
        assert equal(program.module()(*inputs), prepared)
        assert equal(reloaded(program).module()(*inputs), prepared)


@pytest.mark.compiled
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "as_strided" else pytest.mark.slow) for n in CASES])
@pytest.mark.parametrize("unpack", [False, True])
@torch.no_grad()
def test_lowered_and_compiled(name, unpack, stages, compiler):
    _, inputs, prepared, converted = stages(name)
    lowered = lower_to_inductor(converted, unpack=unpack)
    for model in (lowered, torch.compile(lowered, fullgraph=True)):
        for got, want in zip(leaves(model(*inputs)), leaves(prepared), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
