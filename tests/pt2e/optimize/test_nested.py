"""`optimize(anchor=...)`: the weights are values of the anchor, and their slices are those of `optimize` without it."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.optimize.slice import slice_graph
from tests.models import IDS, Tied, module_of

FP4 = MXQuantizer.from_recipe("mxfp4_weight_only")


def net_forward(self, x):
    """A convolution, whose blocks run along dimension 1, and linear layers."""
    return self.down(torch.relu(self.up(torch.relu(self.conv(x)).mean(2))))


def net():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(64, 40, 5, generator=generator),) for _ in range(4)]
    torch.manual_seed(0)
    model = module_of(net_forward, conv=nn.Conv1d(40, 36, 3), up=nn.Linear(36, 96), down=nn.Linear(96, 8)).eval()
    return torch.export.export(model, batches[0]).module(), batches


def quantizer(weight):
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight))


def converted(model, recipe):
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, recipe))


@pytest.mark.diagonal
@pytest.mark.parametrize("anchor", ["mxint8", "mxfp8"])
@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_slices_are_those_of_the_narrow_recipe(anchor, preset):
    exported, batches = net()
    plain = pt2mx.optimize(exported, FP4, batches, preset=preset)
    nested = pt2mx.optimize(exported, FP4, batches, preset=preset, anchor=anchor)
    wide = converted(nested, quantizer(anchor))
    # the weights are values of the anchor
    for weight in pt2mx.packed_weights(wide):
        parameter = nested.get_parameter(weight.name)
        assert torch.equal(weight.dequantized(), parameter)
    (x,) = batches[0]
    alone = converted(plain, FP4)
    sliced = {one.name: one.dequantized() for one in pt2mx.packed_weights(slice_graph(wide, FP4))}
    for one in pt2mx.packed_weights(alone):
        assert torch.equal(sliced.pop(one.name), one.dequantized()), one.name
    assert not sliced and torch.equal(slice_graph(wide, FP4)(x), alone(x))

    def error(model):
        return ((model(x) - exported(x)).square().sum() / exported(x).square().sum()).item()

    assert error(wide) < 0.5 * error(alone)
    # the report describes the narrow weights
    reports = [pt2mx.optimization_report(model).weights for model in (plain, nested)]
    assert reports[0] == reports[1]


def test_tied_weights_and_other_axes():
    exported = torch.export.export(Tied().eval(), (IDS,)).module()
    plain = converted(pt2mx.optimize(exported, FP4, [(IDS,)]), FP4)
    wide = converted(pt2mx.optimize(exported, FP4, [(IDS,)], anchor="mxint8"), quantizer("mxint8"))
    expected = {one.name: one.dequantized() for one in pt2mx.packed_weights(plain)}
    for one in pt2mx.packed_weights(slice_graph(wide, FP4)):
        assert torch.equal(one.dequantized(), expected[one.name])


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (FP4, {"anchor": "mxfp44"}, "mxfp44"),
        (FP4, {"anchor": "mxint8", "preset": "best"}, "learned rounding makes no slices of an anchor: give preset="),
        (quantizer("mxfp8"), {"anchor": "mxfp6"}, "is fp6_e2m3, and the recipe's fp8_e4m3 is wider: give a recipe of"),
        (quantizer("nvfp4"), {"anchor": "mxint8"}, "has blocks of 32, and the recipe blocks of 16: slicing keeps"),
        (
            quantizer("nvfp4"),
            {"anchor": "int8{16}"},
            "is no slice of mxint8{16}: choose formats with E8M0 scales of one",
        ),
    ],
)
def test_bad_input(recipe, options, message):
    exported, batches = net()
    with pytest.raises(MXError) as raised:
        pt2mx.optimize(exported, recipe, batches, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)
