"""`slice_program`: weights have the codes of `quantize_mx(dequantize_mx(anchor), narrow)`, and the outputs are those of
quantizing the float model with the anchor's values."""

import functools
from collections import defaultdict

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, packed_weights
from tests.compare import differing
from tests.flow import convert, reloaded
from tests.models import BATCH, IDS, IMAGES, Encoder, NormalizedConv, Tied
from tests.subgraph_models import Cond, Nested, Scan, WhileLoop


class Mixed(nn.Module):
    """A recurrent layer, convolutions of both kinds with blocks along different axes, and a matmul of activations."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(20, 24, batch_first=True)
        self.up, self.down = nn.ConvTranspose1d(24, 36, 3), nn.Conv1d(36, 6, 3)

    def forward(self, x):
        y = self.down(self.up(self.lstm(x)[0].transpose(1, 2)))
        return y @ y.transpose(1, 2)


def mlp():
    return nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 10))


X = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)),)
#: model and its arguments
MODELS = {
    "mlp": (mlp, X),
    "mixed": (Mixed, (torch.randn(2, 7, 20, generator=torch.Generator().manual_seed(0)),)),
    "tied": (Tied, (IDS,)),
    "encoder": (Encoder, (IDS,)),
    **{model.__name__.lower(): (model, X) for model in (Cond, Scan, WhileLoop)},
}
LSTM = pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")  # export's


def quantizer(weight, activation=None):
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight, activation=activation))


@functools.cache
def anchor_of(name, weight="mxint8", activation="mxint8"):
    """The model, and its program in 8 bits as a file holds it."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().eval()
    return model, reloaded(torch.export.export(convert(model, inputs, quantizer(weight, activation)), inputs))


def formats(program):
    """Return the names of the weights, each with its formats."""
    found = defaultdict(set)
    for weight in packed_weights(program):
        found[weight.name].add(weight.spec.element.name)
    return {name: " ".join(sorted(elements)) for name, elements in found.items()}


@pytest.mark.slow_except("encoder-weight1-None", "cond-mxfp4-mxfp4")
@LSTM
@pytest.mark.parametrize(
    ("weight", "activation"),
    [("mxfp4", "mxfp4"), (pt2mx.MXSpec("mxfp4", scale_mode="even"), None), ("mxfp6", "mxint8")],
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.compiled_cases("encoder-weight1-None")
def test_it_is_the_quantized_model_with_the_values_of_the_anchor(name, weight, activation):
    model, program = anchor_of(name)
    narrow = quantizer(weight, activation)
    sliced = reloaded(pt2mx.slice_program(program, narrow))
    make, inputs = MODELS[name]
    rounded = make().eval()
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        for one in packed_weights(program):
            rounded.get_parameter(one.name).copy_(one.dequantized())
    expected = convert(rounded, inputs, narrow)
    with torch.no_grad():
        assert torch.equal(sliced.module()(*inputs), expected(*inputs))
    weights = {one.name: one for one in packed_weights(expected)}
    for one in packed_weights(sliced):
        same = weights.pop(one.name)
        assert one.spec.element == pt2mx.parse(weight).element and one.spec.axis == same.spec.axis
        assert torch.equal(one.codes, same.codes) and torch.equal(one.scales, same.scales), one.name
    assert not weights
    assert formats(program) == dict.fromkeys(formats(program), "int8")  # it did not change


@pytest.mark.compiled_except("floor-*-mxint8", "even-mxfp4-mxfp8", "mse-mxfp6-mxfp8_e5m2")
@pytest.mark.parametrize("anchor", ["mxint8", "mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("narrow", ["mxfp6", "mxfp6_e3m2", "mxfp4", "int6{32}", "int4{32}", "int2{32}", "e3m4{32}"])
@pytest.mark.parametrize("scale_mode", ["floor", "even", "mse"])
def test_codes_and_scales(anchor, narrow, scale_mode):
    _, program = anchor_of("mlp", anchor, None)
    spec = pt2mx.parse(narrow).replace(scale_mode=scale_mode)
    sliced = pt2mx.slice_program(program, quantizer(spec))
    for before, after in zip(packed_weights(program), packed_weights(sliced), strict=True):
        scales, codes = pt2mx.quantize_mx(before.dequantized(), spec)
        assert after.name == before.name and after.shape == before.shape
        assert torch.equal(after.scales, scales) and torch.equal(after.codes, codes)


@pytest.mark.parametrize("bits", range(2, 8))
def test_integers_lose_their_low_bits(bits):
    """Codes are those of Matryoshka Quantization: rounded to their high bits, under the same scale."""
    _, program = anchor_of("mlp", "mxint8", None)
    sliced = pt2mx.slice_program(program, quantizer(f"int{bits}{{32}}"))
    most = 2 ** (bits - 1) - 1
    for before, after in zip(packed_weights(program), packed_weights(sliced), strict=True):
        assert torch.equal(after.scales, before.scales)
        high = (before.codes.view(torch.int8).float() / 2 ** (8 - bits)).round().clamp(-most, most)
        # a code of `bits` bits is dequantized with the implicit scale of its format
        unit = torch.exp2(after.scales.float() - 127 - (bits - 2)).repeat_interleave(32, -1)[:, : after.shape[1]]
        assert torch.equal(after.dequantized(), high * unit)


def test_weights_that_the_recipe_leaves_keep_their_codes():
    _, program = anchor_of("tied")
    narrow = quantizer("mxfp4").set_module_name("head", None).set_module_name("embedding", None)
    sliced = reloaded(pt2mx.slice_program(program, narrow))
    assert formats(sliced) == {
        "head.weight": "int8",
        "query.weight": "fp4_e2m1",
        "key.weight": "fp4_e2m1",
        "up": "fp4_e2m1",
    }
    before, after = ({one.name: one for one in packed_weights(p)}["head.weight"] for p in (program, sliced))
    assert torch.equal(before.codes, after.codes) and torch.equal(before.scales, after.scales)
    assert not differing(before.dequantized(), after.dequantized()).any()
    # the recipe says nothing of the head's input, which is in high precision now
    assert "quantize_mx.default" not in sliced.graph_module.code.replace("dequantize_mx", "")


def test_one_weight_in_two_formats():
    """The embedding stays in 8 bits, and the head, whose weight is tied to it, gets 4."""
    _, program = anchor_of("tied")
    sliced = reloaded(pt2mx.slice_program(program, quantizer("mxfp4").set_module_name("embedding", None)))
    tied = [one for one in packed_weights(sliced) if "head" in one.name]
    assert sorted(one.spec.element.name for one in tied) == ["fp4_e2m1", "int8"]
    with torch.no_grad():
        module = sliced.module()(IDS)
    (narrow,), (wide,) = ([o.dequantized() for o in tied if o.spec.element.name == e] for e in ("fp4_e2m1", "int8"))
    scales, codes = pt2mx.quantize_mx(wide, "mxfp4")
    assert torch.equal(narrow, pt2mx.dequantize_mx(codes, scales, "mxfp4")) and module.isfinite().all()


@pytest.mark.compiled
def test_a_weight_that_was_packed_along_two_axes():
    """Each of its codes is sliced, also in nested subgraphs."""
    torch.manual_seed(0)
    program = reloaded(torch.export.export(convert(Nested().eval(), X, "mxint8"), X))
    sliced = reloaded(pt2mx.slice_program(program, quantizer("mxfp4")))
    before, after = (
        {(one.name.partition("_1")[0], one.spec.axis): one for one in packed_weights(p)} for p in (program, sliced)
    )
    assert before.keys() == after.keys() == {("inner.weight", 0), ("inner.weight", 1), ("outer.weight", 1)}
    for key, one in before.items():
        scales, codes = pt2mx.quantize_mx(one.dequantized(), pt2mx.MXSpec("mxfp4", axis=one.spec.axis))
        assert torch.equal(after[key].codes, codes) and torch.equal(after[key].scales, scales)


def test_settings_by_module_type_and_name_match_a_loaded_program():
    _, program = anchor_of("tied")
    narrow = MXQuantizer().set_module_type(nn.Linear, MXQuantizationConfig(weight="mxfp6"))
    narrow.set_module_name_regex("query", MXQuantizationConfig(weight="mxfp4"))
    assert formats(pt2mx.slice_program(program, narrow)) == {
        "head.weight": "fp6_e2m3 int8",
        "query.weight": "fp4_e2m1",
        "key.weight": "fp6_e2m3",
        "up": "int8",
    }


def test_a_folded_batch_norm_and_dynamic_shapes():
    torch.manual_seed(0)
    converted = convert(NormalizedConv().eval(), IMAGES, "mxint8", shapes=BATCH)
    program = reloaded(torch.export.export(converted, IMAGES, dynamic_shapes=BATCH))
    sliced = reloaded(pt2mx.slice_program(program, MXQuantizer.from_recipe("mxfp4")))
    for before, after in zip(packed_weights(program), packed_weights(sliced), strict=True):
        scales, codes = pt2mx.quantize_mx(before.dequantized(), pt2mx.MXSpec("mxfp4", axis=1, scale_mode="even"))
        assert torch.equal(after.scales, scales) and torch.equal(after.codes, codes)
    images = torch.randn(5, 3, 8, 8)
    assert sliced.module()(images).shape == (5, 4)
    lowered = pt2mx.lower_to_inductor(sliced.module())
    assert torch.allclose(lowered(images), sliced.module()(images), atol=1e-5)


def test_weights_that_are_quantized_at_each_call():
    inputs = MODELS["mlp"][1]
    model, program = anchor_of("mlp")
    unfolded = torch.export.export(convert(model, inputs, quantizer("mxint8", "mxint8"), fold=False), inputs)
    weights = [packed_weights(pt2mx.slice_program(p, quantizer("mxfp4"))) for p in (program, unfolded)]
    for one, other in zip(*weights, strict=True):
        assert one.name == other.name and torch.equal(one.codes, other.codes)


def test_16_bits():
    model, x = mlp().to(torch.bfloat16).eval(), X[0].to(torch.bfloat16)
    program = torch.export.export(convert(model, (x,), quantizer("mxfp8")), (x,))
    sliced = pt2mx.slice_program(program, quantizer("mxfp4", "mxfp4"))
    assert sliced.module()(x).dtype == torch.bfloat16
    for before, after in zip(packed_weights(program), packed_weights(sliced), strict=True):
        assert torch.equal(after.codes, pt2mx.quantize_mx(before.dequantized(torch.bfloat16), "mxfp4")[1])


def test_a_report_has_the_noise_of_slicing():
    """The error of a weight in the report is its error from the anchor's values."""
    _, program = anchor_of("mlp")
    report = pt2mx.quantization_report(pt2mx.slice_program(program, quantizer("mxfp4", "mxfp8")).module())
    (weight, *_) = packed_weights(program)
    values = weight.dequantized()
    noise = pt2mx.fake_quantize_mx(values, "mxfp4") - values
    expected = 10 * torch.log10(values.square().sum() / noise.square().sum())
    (row, *_) = report.operators
    specs = {operand.role: operand.spec for operand in row.operands}
    assert specs["activation"].startswith("mxfp8_e4m3{32}") and specs["weight"].startswith("mxfp4_e2m1{32}")
    measured = next(operand.statistics.sqnr for operand in row.operands if operand.role == "weight")
    assert measured == pytest.approx(float(expected), abs=1e-3)


def test_it_can_be_sliced_again():
    _, program = anchor_of("mlp")
    six = pt2mx.slice_program(program, quantizer("mxfp6", "mxfp6"))
    four = pt2mx.slice_program(six, quantizer("mxfp4"))
    for before, after in zip(packed_weights(six), packed_weights(four), strict=True):
        assert torch.equal(after.codes, pt2mx.quantize_mx(before.dequantized(), "mxfp4")[1])
    same = pt2mx.slice_program(six, quantizer("mxfp6"))
    for before, after in zip(packed_weights(six), packed_weights(same), strict=True):
        assert torch.equal(after.dequantized(), before.dequantized())


def _float():
    return torch.export.export(mlp().eval(), X)


def _lowered():
    return torch.export.export(pt2mx.lower_to_inductor(anchor_of("mlp")[1].module()), X)


def _prepared():
    with torch.no_grad():
        prepared = pt2mx.prepare_pt2e(_float().module(), quantizer("mxint8"))
        return torch.export.export(prepared, X)


@pytest.mark.compiled_cases("*-a portable program*")
@pytest.mark.parametrize(
    ("program", "recipe", "message"),
    [
        (lambda: mlp(), quantizer("mxfp4"), "expected an ExportedProgram, not Sequential: pass what load_program ret"),
        (
            _float,
            quantizer("mxfp4"),
            "holds no packed weights: quantize the model with an 8-bit recipe, such as mxint8",
        ),
        (_lowered, quantizer("mxfp4"), "is lowered: slice the one that it was lowered from, then lower the result"),
        (_prepared, quantizer("mxfp4"), "a prepared model has no packed weights yet: pass what convert_pt2e returned"),
        (
            lambda: pt2mx.make_portable(anchor_of("mlp")[1]),
            quantizer("mxfp4"),
            "a portable program holds no packed weights by name: give the one that it was made of",
        ),
        (
            lambda: pt2mx.slice_program(anchor_of("mlp")[1], quantizer("mxfp4")),
            quantizer("mxfp6"),
            "0.weight is fp4_e2m1, and the recipe's fp6_e2m3 is wider: give a recipe of at most 4 bits, or",
        ),
        (
            lambda: anchor_of("mlp")[1],
            quantizer("mxfp4{16}"),
            "0.weight has blocks of 32, and the recipe blocks of 16: slicing keeps blocks, so give a recipe with",
        ),
        (
            lambda: anchor_of("mlp")[1],
            quantizer("fp4_e2m1{32x32}"),
            "0.weight has blocks of 32, and the recipe blocks of 32x32: slicing keeps blocks, so give a recipe with",
        ),
        (
            lambda: anchor_of("mlp")[1],
            quantizer(None, "mxfp4"),
            "the recipe selects no packed weight of the program: no weight would change",
        ),
        (
            lambda: anchor_of("mlp")[1],
            MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4", activation="nvfp4")),
            "static tensor scales need calibration: give the recipe tensor_scale: dynamic",
        ),
    ],
)
def test_errors(program, recipe, message):
    with pytest.raises(MXError) as raised:
        pt2mx.slice_program(program(), recipe)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_program_without_example_inputs():
    _, program = anchor_of("mlp")
    program = reloaded(program)
    program._example_inputs = None
    with pytest.raises(MXError, match="holds no example inputs: export it again"):
        pt2mx.slice_program(program, quantizer("mxfp4"))
