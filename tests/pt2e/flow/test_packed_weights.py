"""`packed_weights`: each has the values of the quantized float weight, to the bit."""

import functools

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.fx.graph.node import parameter_of
from pt2mx.fx.targets.pairs import pairs_of
from pt2mx.pt2e.flow.packed_weights import PackedWeight, packed_bytes, packed_weights
from tests.compare import differing
from tests.flow import convert, prepare
from tests.fresh_process import run_program
from tests.language_models import exported_decoder, quantized_decoder
from tests.models import IDS, IMAGES, Encoder, NormalizedConv, Tied, chain, module_of
from tests.subgraph_models import QUANTIZER, Cond, WhileLoop


def recurrent():
    lstm = nn.LSTM(20, 24, num_layers=2, bidirectional=True, batch_first=True)
    return module_of(lambda self, x: self.lstm(x)[0], lstm=lstm)


def convolutions():
    """Blocks along the channels, which come first in the weight of a transposed convolution."""
    return chain(up=nn.ConvTranspose2d(3, 36, 3), down=nn.Conv2d(36, 6, 3))


def two_tables():
    tables = nn.ModuleList([nn.Embedding(20, 70), nn.Embedding(5, 70)])
    return module_of(lambda self, ids: self.tables[0](ids) + self.tables[1](ids % 5), tables=tables)


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


#: model, its arguments, quantizer, and the weights that are quantized
CASES = {
    "readme": (mlp, (torch.randn(8, 64),), "mxfp4_weight_only", ["0.weight", "2.weight"]),
    "tied": (Tied, (IDS,), "mxfp4", ["head.weight", "query.weight", "key.weight", "up"]),
    "tables": (two_tables, (IDS,), "mxfp6", ["tables.0.weight", "tables.1.weight"]),
    "convolutions": (convolutions, IMAGES, "mxfp6", ["up.weight", "down.weight"]),
    "lstm": (
        recurrent,
        (torch.randn(2, 5, 20),),
        "mxfp8",
        [f"lstm.weight_{kind}_l{i}{way}" for i in "01" for way in ("", "_reverse") for kind in ("ih", "hh")],
    ),
    "cond": (Cond, (torch.randn(8, 64),), QUANTIZER, ["inner.weight", "outer.weight"]),
    "while_loop": (WhileLoop, (torch.randn(8, 64),), QUANTIZER, ["inner.weight", "outer.weight"]),
}


@functools.cache
def made(name, fold=True):
    """The model of a case, and the converted one."""
    torch.manual_seed(0)
    make, inputs, quantizer, _ = CASES[name]
    model = make().eval()
    return model, convert(model, inputs, quantizer, fold=fold)


def check(model, weights, specs=None):
    """`specs`: the specs with modes, which the program does not record."""
    for weight in weights:
        parameter = model.get_parameter(weight.name).detach()
        spec = specs[weight.name] if specs else weight.spec
        assert (weight.spec.element, weight.spec.block_size, weight.spec.axis) == (
            spec.element,
            spec.block_size,
            spec.axis,
        )
        assert weight.shape == parameter.shape
        assert weight.codes.dtype == weight.scales.dtype == torch.uint8
        assert not differing(weight.dequantized(), pt2mx.fake_quantize_mx(parameter, spec)).any(), weight.name
        args = (weight.codes, weight.scales, weight.spec)
        values = pt2mx.dequantize_mx(*args, length=weight.shape[weight.spec.axis])
        assert torch.equal(values, weight.dequantized())


@pytest.mark.compiled_cases("while_loop", "tied")
@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")  # export's
@pytest.mark.parametrize("name", CASES)
def test_weights(name):
    for fold in (True, False):
        model, converted = made(name, fold)
        weights = list(packed_weights(converted))
        assert sorted(weight.name for weight in weights) == sorted(CASES[name][3])
        check(model, weights)


_READ = """
import sys, torch, pt2mx
from pt2mx.pt2e.flow.packed_weights import packed_weights
for name in sys.argv[1:]:
    weights = packed_weights(pt2mx.load_program(f"{name}.pt2"))
    torch.save([(w.name, w.spec.element.name, w.spec.block_size, w.spec.axis, *w[2:]) for w in weights], f"{name}.pt")
"""


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")
@pytest.mark.compiled
def test_files_in_a_fresh_process(tmp_path):
    models, specs = {}, {}
    for name, (_, inputs, *_) in CASES.items():
        models[name], converted = made(name)
        specs[name] = {weight.name: weight.spec for weight in packed_weights(converted)}
        pt2mx.save_program(torch.export.export(converted, inputs), tmp_path / f"{name}.pt2")
    result = run_program(_READ, "-c", tmp_path, arguments=list(CASES))
    assert (result.status, result.err) == (0, "")
    for name, model in models.items():
        read = torch.load(tmp_path / f"{name}.pt")
        weights = [PackedWeight(row[0], pt2mx.MXSpec(*row[1:4]), *row[4:]) for row in read]
        assert {weight.name for weight in weights} == set(CASES[name][3])
        check(model, weights, specs[name])


def test_the_tensors_are_the_program_s_own():
    converted = convert(mlp(), (torch.randn(8, 64),), "mxfp4")
    code, buffers = converted.code, dict(converted.named_buffers())
    for weight in packed_weights(converted):
        assert weight.codes.data_ptr() == buffers[f"{weight.name}_data"].data_ptr()
        assert weight.scales.data_ptr() == buffers[f"{weight.name}_scale"].data_ptr()
    assert converted.code == code and dict(converted.named_buffers()).keys() == buffers.keys()


def test_an_encoder():
    """An encoder has projections, an embedding, and matmuls of activations, which have no weight."""
    torch.manual_seed(0)
    model, ids = Encoder().eval(), torch.randint(0, 20, (2, 7))
    weights = list(packed_weights(convert(model, (ids,), "mxfp4")))
    float_weights = {name for name, p in model.named_parameters(remove_duplicate=False) if p.dim() == 2}
    assert {weight.name for weight in weights} <= float_weights and len(weights) > 4
    check(model, weights)


@pytest.mark.compiled
def test_minilm(minilm):
    """The pretrained encoder: a table and 36 layers."""
    converted = pt2mx.convert_pt2e(
        pt2mx.prepare_pt2e(minilm.program.module(), MXQuantizer.from_recipe("mxfp4_weight_only"))
    )
    weights = list(packed_weights(converted))
    assert len(weights) >= 37
    held = minilm.program.state_dict
    for weight in weights:
        assert torch.equal(weight.dequantized(), pt2mx.fake_quantize_mx(held[weight.name].detach(), weight.spec))


@pytest.mark.compiled
def test_experts():
    """Weights of three dimensions, which the graph transposes before they are quantized."""
    model, _ = exported_decoder("mixtral", num_hidden_layers=1)
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    weights = list(packed_weights(quantized_decoder("mixtral", quantizer, num_hidden_layers=1).program.module()))
    assert {weight.name.rpartition(".")[2] for weight in weights if len(weight.shape) == 3} == {
        "gate_up_proj",
        "down_proj",
    }
    for weight in weights:
        parameter = next(p for name, p in model.named_parameters() if name.endswith(weight.name.removeprefix("model.")))
        values = parameter.detach().transpose(-2, -1) if parameter.dim() == 3 else parameter.detach()
        assert weight.shape == values.shape
        spec = weight.spec.replace(scale_mode="even")
        assert torch.equal(weight.dequantized(), pt2mx.fake_quantize_mx(values, spec)), weight.name


def test_a_batch_norm_is_folded_into_the_weight():
    """The values equal the quantized weight, which is no longer a parameter."""
    model = NormalizedConv().eval()
    (conv, fc) = packed_weights(convert(model, IMAGES, "mxfp8"))
    scaled = model.conv.weight * (model.bn.weight / torch.sqrt(model.bn.running_var + model.bn.eps)).view(-1, 1, 1, 1)
    assert torch.allclose(conv.dequantized(), pt2mx.fake_quantize_mx(scaled.detach(), conv.spec), rtol=0.13)
    assert conv.shape == (8, 3, 3, 3) and fc.name == "fc.weight"


@pytest.mark.parametrize("name", ["readme", "tied", "cond"])
def test_lowered(name):
    """The name of a weight tells that it is stored in another form."""
    (_, converted), inputs = made(name), CASES[name][1]
    values = {weight.name: weight.dequantized() for weight in packed_weights(converted)}
    lowered = pt2mx.lower_to_inductor(converted)
    for program in (lowered, torch.export.export(lowered, inputs)):
        for weight in packed_weights(program):
            stored = weight.dequantized()
            first = values[weight.name.removesuffix("_joined").removesuffix("_t")]
            stored = stored.T if weight.name.endswith("_t") else stored
            stored = stored[: len(first)] if weight.name.endswith("_joined") else stored
            assert torch.equal(stored, first), weight.name


@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3{32x32}(f32)", "int4{32}(bf16)"])
def test_scale_formats(name):
    """In converted, lowered and exported programs."""
    model, x, spec = mlp(), torch.randn(8, 64), pt2mx.parse(name)
    converted = convert(model, (x,), MXQuantizer().set_global(pt2mx.MXQuantizationConfig(weight=name)))
    lowered = pt2mx.lower_to_inductor(converted)
    for program in (converted, lowered, torch.export.export(converted, (x,)), torch.export.export(lowered, (x,))):
        weights = list(packed_weights(program))
        assert [weight.name for weight in weights] == ["0.weight", "2.weight"]
        for weight in weights:
            parameter = model.get_parameter(weight.name).detach()
            assert weight.spec.replace(axis=-1) == spec.replace(axis=-1, scale_mode=None, rounding="even")
            assert torch.equal(weight.dequantized(), pt2mx.fake_quantize_mx(parameter, spec))
            stored = [t for t in (weight.codes, weight.scales, weight.tensor_scale) if t is not None]
            assert packed_bytes(weight.shape, weight.spec) == sum(t.nbytes for t in stored)
    report = pt2mx.quantization_report(converted)
    assert report.bytes_after == sum(tensor.nbytes for tensor in converted.state_dict().values())


def test_the_modes_of_a_converted_model():
    quantizer = MXQuantizer().set_global(
        pt2mx.MXQuantizationConfig(weight=pt2mx.MXSpec("mxfp4", 16, scale_mode="rceil", rounding="half_away"))
    )
    model = mlp()
    weights = list(packed_weights(convert(model, (torch.randn(8, 64),), quantizer)))
    check(model, weights)
    for weight in weights:
        assert (weight.spec.block_size, weight.spec.scale_mode, weight.spec.rounding) == (16, "rceil", "half_away")


@pytest.mark.parametrize(
    ("buffer", "parameter"),
    [
        ("up.weight_data", "up.weight"),
        ("up.weight_data_1", "up.weight"),
        ("up.weight_1_data", "up.weight_1"),
        ("up.weight_1_data_2", "up.weight_1"),
        ("up.weight_rounded_data", "up.weight"),
        ("up.weight_1_rounded_2_data_3", "up.weight_1"),
        ("up.weight_data_t", "up.weight_t"),
        ("up.weight_data_1_t_2_joined", "up.weight_t_joined"),
        ("my_database.table", "my_database.table"),
        ("my.database", "my.database"),
        ("my_data.weight_data", "my_data.weight"),
        ("my_data.codes", "my_data.codes"),
    ],
)
def test_the_parameter_of_a_buffer(buffer, parameter):
    assert parameter_of(buffer) == parameter


def test_a_weight_in_two_formats_has_the_name_of_its_parameter():
    chosen = MXQuantizer.from_recipe("mxfp4").set_module_name("query", pt2mx.MXQuantizationConfig(weight="mxfp8"))
    model = Tied()
    model.key.weight = model.query.weight
    converted = convert(model, (IDS,), chosen)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    of_pairs = [pair.name for pair in pairs_of(converted) if pair.is_weight]
    for names in (of_pairs, [weight.name for weight in packed_weights(converted)]):
        assert names.count("key.weight") == 2 and parameters.issuperset(names)


def test_nothing_quantized():
    x = torch.randn(8, 64)
    assert not list(packed_weights(torch.export.export(mlp(), (x,))))


@pytest.mark.compiled
def test_what_has_no_packed_weights():
    x = torch.randn(8, 64)
    with pytest.raises(MXError, match="not Sequential"):
        packed_weights(mlp())
    with pytest.raises(MXError, match="pass what convert_pt2e returned"):
        packed_weights(prepare(mlp(), (x,), pt2mx.get_default_mx_quantization_config("mxfp4")))
    program = torch.export.export(convert(mlp(), (x,), "mxfp4"), (x,))
    with pytest.raises(MXError, match="give the one that it was made of"):
        packed_weights(pt2mx.make_portable(program))
