"""Every name of pt2-bfp's API with a value, and a program written for it."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXSpec, fake_quantize_mx
from pt2mx.pt2e import pt2bfp
from tests.models import chain

BFP16 = MXSpec("int8", 64)
X = torch.linspace(-1, 1, 64).view(1, 64)


def exported(seed=0):
    torch.manual_seed(seed)
    return torch.export.export(chain(linear=nn.Linear(64, 8)).eval(), (X,)).module()


def spec(role, constructor=None):
    return pt2bfp.BFPQuantizationSpec(f"BFP[{role}|8]{{16}}(SN)", constructor, torch.per_tensor_symmetric, None, False)


def config(is_qat=False):
    return pt2bfp.BFPQuantizationConfig(spec(16), spec(12), spec(8), spec(9), is_qat)


def spec_of(annotation):
    return pt2mx.pt2e.observe.qspec.mx_spec(annotation)


def seen(observer):
    made = observer.with_args(eps=2**-12)(qscheme=("mx", "int8", 64, 1, "floor", "even"))
    made(X)
    return [round(v, 4) for v in (*made.min_val[:1].tolist(), *made.max_val[-1:].tolist())]


def prepared(prepare=pt2bfp.prepare_pt2e):
    return prepare(exported(), pt2bfp.BFPQuantizer().set_global(config()))


def switched(switch, flag, first):
    model = prepared()
    (pt2bfp.disable_observer if first else pt2bfp.enable_fake_quant)(model)
    switch(model)
    return {getattr(m, flag) for m in model.modules() if hasattr(m, flag)}


def annotated(function, *where):
    node = next(n for n in exported().graph.nodes if n.op == "call_function")
    function(node, *([node.args[0]] if where else []), "spec")
    annotation = next(v for v in node.meta.values() if isinstance(v, pt2bfp.BFPQuantizationAnnotation))
    return annotation.input_qspec_map[node.args[0]] if where else annotation.output_qspec


def affine(constructor):
    made = constructor()
    return type(made).__name__, made.quant_min, made.quant_max


def observers(model):
    return sum(isinstance(m, pt2mx.MXObserver) for m in model.modules())


QCONFIG = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
FORMATS = ("MXFP8[E4M3]{64}", "MXFP8[E5M2]{64}", "BFP[8|8]{64}(SN)")


def eager(flow):
    model = chain(linear=nn.Linear(64, 8)).eval()
    model.qconfig = QCONFIG
    return observers(flow(model))


def traced(flow):
    return observers(flow(torch.fx.symbolic_trace(chain(linear=nn.Linear(64, 8)).eval()), {"": QCONFIG}, (X,)))


NAMES = {
    "BFPQuantizer": (lambda: isinstance(pt2bfp.BFPQuantizer().set_global(config()), pt2mx.MXQuantizer), True),
    "QConfigMapping": (
        lambda: pt2bfp.QConfigMapping().set_object_type(nn.Linear, config()).to_dict()["object_type"][0][0],
        "torch.nn.modules.linear.Linear",
    ),
    "QConfig": (
        lambda: pt2bfp.QConfig(
            activation=pt2bfp.MinMaxObserver.with_args(dtype="BFP12").with_args(eps=1.0),
            weight=pt2bfp.HistogramObserver,
        ).to_dict()["activation"],
        "mxint4{128}",
    ),
    "BFPQuantizationSpec": (lambda: pt2bfp.BFPQuantizationSpec().dtype, BFP16),
    "BFPQuantizationConfig": (lambda: str(config().output), "mxint12{16}"),
    "BFPQuantizationAnnotation": (lambda: pt2bfp.BFPQuantizationAnnotation().input_qspec_map, {}),
    "SharedBFPQuantizationSpec": (lambda: pt2bfp.SharedBFPQuantizationSpec(1).edge_or_node, 1),
    "BFPOperatorConfig": (lambda: pt2bfp.BFPOperatorConfig(config(), []).operators, []),
    "Format": (lambda: pt2bfp.Format.from_shorthand("BFP[8|8]{64}(SN)"), BFP16),
    "PlaceholderObserver": (lambda: pt2bfp.PlaceholderObserver is pt2mx.MXObserver, True),
    "FakeQuantize": (lambda: pt2bfp.FakeQuantize is pt2mx.MXFakeQuantize, True),
    "MinMaxObserver": (lambda: seen(pt2bfp.MinMaxObserver), [-1.0, 1.0]),
    "MovingAverageMinMaxObserver": (lambda: seen(pt2bfp.MovingAverageMinMaxObserver), [-1.0, 1.0]),
    "HistogramObserver": (lambda: seen(pt2bfp.HistogramObserver), [-1.0, 1.0]),
    "PerChannelMinMaxObserver": (lambda: seen(pt2bfp.PerChannelMinMaxObserver), [-1.0, 1.0]),
    "MovingAveragePerChannelMinMaxObserver": (
        lambda: seen(pt2bfp.MovingAveragePerChannelMinMaxObserver.with_args(ch_axis=1)),
        [-1.0, 1.0],
    ),
    "get_input_act_qspec": (lambda: spec_of(pt2bfp.get_input_act_qspec(config())), MXSpec("int16", 16)),
    "get_output_act_qspec": (lambda: spec_of(pt2bfp.get_output_act_qspec(config(), axis=2)), MXSpec("int12", 16, 2)),
    "get_weight_qspec": (lambda: spec_of(pt2bfp.get_weight_qspec(config())), MXSpec("int8", 16)),
    "get_bias_qspec": (lambda: spec_of(pt2bfp.get_bias_qspec(config())), MXSpec("int9", 16)),
    "annotate_input_qspec_map": (lambda: annotated(pt2bfp._annotate_input_qspec_map, "input"), "spec"),
    "annotate_output_qspec": (lambda: annotated(pt2bfp._annotate_output_qspec), "spec"),
    "prepare_pt2e": (lambda: sum(isinstance(m, pt2mx.MXObserver) for m in prepared().modules()), 4),
    "prepare_qat_pt2e": (
        lambda: sum(isinstance(m, pt2mx.MXFakeQuantize) for m in prepared(pt2bfp.prepare_qat_pt2e).modules()),
        4,
    ),
    "convert_pt2e": (lambda: tuple(pt2bfp.convert_pt2e(prepared()).linear.weight_data.shape), (8, 64)),
    "enable_fake_quant": (lambda: switched(pt2bfp.enable_fake_quant, "fake_quant_enabled", True), {True}),
    "disable_fake_quant": (lambda: switched(pt2bfp.disable_fake_quant, "fake_quant_enabled", False), {False}),
    "enable_observer": (lambda: switched(pt2bfp.enable_observer, "observer_enabled", True), {True}),
    "disable_observer": (lambda: switched(pt2bfp.disable_observer, "observer_enabled", False), {False}),
    "DEFAULT_FORMAT": (lambda: pt2bfp.DEFAULT_FORMAT, BFP16),
    "DEFAULT_STATIC_QUANT_MODULE_MAPPINGS": (
        lambda: [
            nn.Conv2d in pt2bfp.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
            len(pt2bfp.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS),
        ],
        [True, 15],
    ),
    "default_fake_quant": (lambda: affine(pt2bfp.default_fake_quant), ("FakeQuantize", 0, 255)),
    "default_weight_fake_quant": (lambda: affine(pt2bfp.default_weight_fake_quant), ("FakeQuantize", -128, 127)),
    "default_per_channel_weight_fake_quant": (
        lambda: affine(pt2bfp.default_per_channel_weight_fake_quant),
        ("FakeQuantize", -128, 127),
    ),
    "max_norm": (lambda: [pt2bfp.max_norm(f) for f in FORMATS], [448.0, 57344.0, 1.984375]),
    "min_norm": (lambda: [pt2bfp.min_norm(f) for f in FORMATS], [2.0**-6, 2.0**-14, 0.0]),
    "prepare": (lambda: eager(pt2bfp.prepare), 2),
    "prepare_qat": (lambda: eager(pt2bfp.prepare_qat), 2),
    "convert": (lambda: eager(lambda model: pt2bfp.convert(pt2bfp.prepare(model))), 0),
    "quantize": (lambda: eager(lambda model: pt2bfp.quantize(model, lambda m, x: m(x), [X])), 0),
    "prepare_fx": (lambda: traced(pt2bfp.prepare_fx), 2),
    "prepare_qat_fx": (lambda: traced(pt2bfp.prepare_qat_fx), 2),
    "convert_fx": (lambda: traced(lambda *args: pt2bfp.convert_fx(pt2bfp.prepare_fx(*args))), 0),
    "check_diff": (lambda: pt2bfp.check_diff(exported()(X), exported()(X)), None),
}


@pytest.mark.parametrize("name", pt2bfp.__all__)
def test_every_name_gives_its_value(name):
    call, value = NAMES[name]
    assert call() == value


class BackendQuantizer(pt2bfp.BFPQuantizer):
    """A quantizer as a user of pt2-bfp writes it: it annotates every linear layer itself."""

    def set_global(self, quantization_config):
        self.global_config = quantization_config
        return self

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                pt2bfp._annotate_input_qspec_map(node, node.args[0], pt2bfp.get_input_act_qspec(self.global_config))
                pt2bfp._annotate_output_qspec(node.args[1], pt2bfp.get_weight_qspec(self.global_config))
                pt2bfp._annotate_output_qspec(node.args[2], pt2bfp.get_bias_qspec(self.global_config))
                pt2bfp._annotate_output_qspec(node, pt2bfp.get_output_act_qspec(self.global_config))
        return model

    def validate(self, model):
        pass


def test_a_program_of_pt2_bfp():
    default = pt2bfp.Format.from_shorthand("BFP[8|8]{64}(SN)")
    act = pt2bfp.BFPQuantizationSpec(
        dtype=default,
        qscheme=torch.per_tensor_symmetric,
        is_dynamic=False,
        observer_or_fake_quant_ctr=pt2bfp.HistogramObserver.with_args(eps=2**-12),
    )
    weight = pt2bfp.BFPQuantizationSpec(
        dtype="BFP[16|8]{64}(SN)", ch_axis=0, observer_or_fake_quant_ctr=pt2bfp.MinMaxObserver.with_args(eps=2**-12)
    )
    quantizer = BackendQuantizer().set_global(pt2bfp.BFPQuantizationConfig(act, None, weight, None))
    model = pt2bfp.prepare_pt2e(exported(), quantizer)
    linear = nn.Linear(64, 8)
    linear.load_state_dict({k.removeprefix("linear."): v for k, v in exported().state_dict().items()})
    assert torch.equal(model(X), linear(X))
    assert sorted(type(m).__name__ for m in model.modules() if isinstance(m, pt2mx.MXObserver)) == [
        "MXHistogramObserver",
        "MXMinMaxObserver",
    ]
    converted = pt2bfp.convert_pt2e(model)
    want = nn.functional.linear(fake_quantize_mx(X, default), fake_quantize_mx(linear.weight, "int16", 64), linear.bias)
    pt2bfp.check_diff(converted(X), want)
    assert converted.linear.weight_data.shape == (8, 128)  # two bytes a code


def test_nothing_is_annotated_where_a_config_names_no_spec():
    empty = pt2bfp.BFPQuantizationConfig(None, None, spec(8), None)
    functions = (
        pt2bfp.get_input_act_qspec,
        pt2bfp.get_output_act_qspec,
        pt2bfp.get_weight_qspec,
        pt2bfp.get_bias_qspec,
    )
    assert [function(None) for function in functions] == [None] * 4
    assert [function(empty) is None for function in functions] == [True, True, False, True]


def test_a_qconfig_of_weights_only():
    weight = pt2bfp.QConfig(activation=nn.Identity, weight=pt2bfp.MinMaxObserver)
    assert (weight.activation, weight.weight) == (None, BFP16)
    assert weight.module_of("weight") is pt2bfp.MinMaxObserver


def test_training_asks_for_fake_quantization():
    assert pt2bfp.get_weight_qspec(config(is_qat=True)).observer_or_fake_quant_ctr is pt2mx.MXFakeQuantize


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pt2bfp.BFPQuantizationConfig("BFP16", None, None, None), "activation: expected a BFPQuantizationSpec"),
        (lambda: pt2bfp.BFPQuantizationSpec("BFP[17|8]{64}"), "int16"),
        (lambda: pt2bfp.get_weight_qspec("BFP16"), "expected an MXQuantizationConfig or None, not 'BFP16'"),
        (lambda: pt2bfp.QConfig(activation=nn.Linear, weight=pt2bfp.MinMaxObserver), "must be MXObserver"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(MXError, match=message):
        call()
