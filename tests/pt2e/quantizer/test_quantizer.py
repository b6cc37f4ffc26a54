import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer import ComposableQuantizer

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, get_default_mx_quantization_config
from tests.flow import exported
from tests.models import TwoLayers, chain

FP8 = get_default_mx_quantization_config()
FP4 = MXQuantizationConfig(weight="mxfp4")
INT8 = MXQuantizationConfig(weight="mxint8")


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


INPUTS = (torch.randn(2, 4, 32),)


def prepared(quantizer):
    return pt2mx.prepare_pt2e(exported(TwoLayers().eval(), *INPUTS), quantizer)


def specs(quantizer):
    """Operator's position -> the specs of its operands, first letter first: "fp8/fp4"."""
    report = pt2mx.quantization_report(prepared(quantizer))
    return {
        f"{o.module}:{o.operator.removeprefix('aten.')}": "/".join(
            p.spec.removeprefix("mx").split("{")[0] if p.spec else "-" for p in o.operands if p.role != "bias"
        )
        for o in report.operators
    }


def test_global():
    assert set(specs(MXQuantizer().set_global(FP8)).values()) == {"fp8_e4m3/fp8_e4m3"}


def test_module_name_is_the_qualified_name_of_a_module_or_of_one_around():
    got = specs(MXQuantizer().set_module_name("layers.0.q_proj", FP4).set_module_name("layers.1", FP8))
    assert got["layers.0.q_proj:linear"] == "-/fp4_e2m1"
    assert got["layers.0.k_proj:linear"] == "-/-" and got["lm_head:linear"] == "-/-"
    assert got["layers.1.q_proj:linear"] == got["layers.1:bmm"] == "fp8_e4m3/fp8_e4m3"


def test_a_container_that_is_not_called_is_a_module_too():
    got = specs(MXQuantizer().set_module_name("layers", FP4).set_module_name("layers.1", None))
    assert got["layers.0.q_proj:linear"] == "-/fp4_e2m1"
    assert got["layers.1.q_proj:linear"] == "-/-" and got["lm_head:linear"] == "-/-"


def test_the_innermost_module_wins_whatever_the_order():
    for names in (("layers.0", "layers.0.q_proj"), ("layers.0.q_proj", "layers.0")):
        quantizer = MXQuantizer()
        for name in names:
            quantizer.set_module_name(name, FP4 if name.endswith("q_proj") else FP8)
        got = specs(quantizer)
        assert got["layers.0.q_proj:linear"] == "-/fp4_e2m1"
        assert got["layers.0.k_proj:linear"] == "fp8_e4m3/fp8_e4m3"


def test_regex_matches_whole_names_and_the_first_that_was_set_wins():
    quantizer = MXQuantizer().set_global(FP8)
    quantizer.set_module_name_regex(r".*lm_head", None).set_module_name_regex(r"layers\.\d+\.q.*", FP4)
    quantizer.set_module_name_regex(r"layers.*", INT8)
    got = specs(quantizer)
    assert got["lm_head:linear"] == "-/-"
    assert got["layers.1.q_proj:linear"] == "-/fp4_e2m1" and got["layers.1.k_proj:linear"] == "-/int8"


@pytest.mark.parametrize("kind", [nn.Linear, "torch.nn.Linear", "torch.nn.modules.linear.Linear", "Linear"])
def test_module_type(kind):
    got = specs(MXQuantizer().set_module_type(kind, FP4))
    assert got["layers.0.q_proj:linear"] == "-/fp4_e2m1" and got["layers.0:bmm"] == "-/-"


@pytest.mark.parametrize("operator", [torch.ops.aten.bmm.default, torch.ops.aten.bmm, "aten.bmm", "aten.bmm.default"])
def test_operator_type(operator):
    got = specs(MXQuantizer().set_operator_type(operator, FP8))
    assert got["layers.0:bmm"] == "fp8_e4m3/fp8_e4m3" and got["layers.0:matmul"] == "-/-"


def test_filter_function():
    quantizer = MXQuantizer().set_global(FP8).set_filter_function(lambda node: "bmm" in node.name)
    got = specs(quantizer)
    assert got["layers.0:bmm"] == "fp8_e4m3/fp8_e4m3" and got["lm_head:linear"] == "-/-"
    assert specs(quantizer.set_filter_function(None))["lm_head:linear"] == "fp8_e4m3/fp8_e4m3"


def test_precedence():
    """Filter, exact name, regex, type, operator, global: each setting overrides the ones after it."""
    quantizer = MXQuantizer()
    steps = [
        (lambda q: q.set_global(MXQuantizationConfig(weight="mxfp8_e5m2")), "-/fp8_e5m2"),
        (lambda q: q.set_operator_type("aten.linear", MXQuantizationConfig(weight="mxfp6_e3m2")), "-/fp6_e3m2"),
        (lambda q: q.set_module_type(nn.Linear, MXQuantizationConfig(weight="mxfp6_e2m3")), "-/fp6_e2m3"),
        (lambda q: q.set_module_name_regex("lm_.*", FP4), "-/fp4_e2m1"),
        (lambda q: q.set_module_name("lm_head", INT8), "-/int8"),
        (lambda q: q.set_filter_function(lambda node: False), "-/-"),
    ]
    for step, want in steps:
        assert specs(step(quantizer))["lm_head:linear"] == want


@pytest.mark.parametrize(("key", "count"), [("aten.conv2d", 2), ("aten.conv2d.padding", 1), (torch.ops.aten.conv2d, 2)])
def test_operator_type_covers_overloads_and_the_exact_one_wins(key, count):
    convolutions = chain(plain=nn.Conv2d(8, 8, 3), same=nn.Conv2d(8, 8, 3, padding="same"))
    model = torch.export.export(convolutions.eval(), (torch.randn(1, 8, 8, 8),)).module()
    quantizer = MXQuantizer().set_operator_type(key, FP4)
    report = pt2mx.quantization_report(pt2mx.prepare_pt2e(model, quantizer))
    assert sum(o.quantized for o in report.operators) == count
    quantizer.set_operator_type("aten.conv2d.padding", INT8)
    report = pt2mx.quantization_report(pt2mx.prepare_pt2e(model, quantizer))
    assert report.operators[1].operands[1].spec == "mxint8{32}"


def test_operands_have_specs_of_their_own():
    config = MXQuantizationConfig("mxfp8", "mxfp4", operands={"input": "mxint8"})
    quantizer = MXQuantizer().set_global(FP8).set_operator_type("aten.bmm", config)
    quantizer.set_operator_type("aten.matmul", MXQuantizationConfig("mxfp8", operands={"other": None}))
    got = specs(quantizer)
    assert got["layers.0:bmm"] == "int8/fp8_e4m3" and got["layers.0:matmul"] == "fp8_e4m3/-"
    assert got["lm_head:linear"] == "fp8_e4m3/fp8_e4m3"


def test_operands_of_attention():
    model = torch.export.export(Attention(), (torch.randn(1, 2, 8, 32),)).module()
    config = MXQuantizationConfig("mxfp8", operands={"query": None, "value": "mxint8{8}"})
    report = pt2mx.quantization_report(pt2mx.prepare_pt2e(model, MXQuantizer().set_global(config)))
    assert [o.spec for o in report.operators[0].operands] == [None, "mxfp8_e4m3{32}", "mxint8{8}"]


def test_an_operand_that_no_operator_has_is_reported():
    quantizer = MXQuantizer().set_global(FP8)
    quantizer.set_module_name("lm_head", MXQuantizationConfig(weight="mxfp4", operands={"query": "mxfp8"}))
    with pytest.warns(UserWarning, match="the operand 'query' has one; they have bias, input, weight"):
        prepared(quantizer)


ORDER = ("layers.0.q_proj:linear", "layers.0.k_proj:linear", "layers.0:bmm", "layers.0:matmul")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_first_and_last(count):
    got = specs(MXQuantizer().set_global(FP8).set_first(FP4, count).set_last(None))
    assert list(got) == [*ORDER, *(name.replace("layers.0", "layers.1") for name in ORDER), "lm_head:linear"]
    weights = [name for name, spec in got.items() if spec == "-/fp4_e2m1"]
    assert weights == list(ORDER[: min(count, 2)]), "a matmul of computed tensors has no weight"
    assert got["lm_head:linear"] == "-/-" and got["layers.1:matmul"] == "fp8_e4m3/fp8_e4m3"
    if count == 3:
        assert got["layers.0:bmm"] == "-/-" and got["layers.0:matmul"] == "fp8_e4m3/fp8_e4m3"


def test_first_counts_operators_that_other_settings_quantize():
    quantizer = MXQuantizer().set_global(INT8).set_module_name("layers.0", None).set_first(FP8).set_last(FP4, 2)
    got = specs(quantizer)
    assert got["layers.0.q_proj:linear"] == "-/-", "it is not quantized, so it is not the first"
    assert got["layers.1.q_proj:linear"] == "fp8_e4m3/fp8_e4m3"
    # weight-only: nothing is quantized in matmuls of activations, so they do not count
    assert got["layers.1.k_proj:linear"] == got["lm_head:linear"] == "-/fp4_e2m1"


def test_ends_win_over_names_and_the_smallest_count_wins():
    quantizer = MXQuantizer().set_global(FP8).set_module_name("layers.0.q_proj", INT8)
    quantizer.set_first(FP4, 2).set_first(None, 1).set_last(INT8, 100)
    got = specs(quantizer)
    assert got["layers.0.q_proj:linear"] == "-/-" and got["layers.0.k_proj:linear"] == "-/fp4_e2m1"
    assert got["lm_head:linear"] == "-/int8"
    report = pt2mx.quantization_report(prepared(quantizer))
    assert report.operators[0].reason == "excluded by first 1"
    quantizer.set_filter_function(lambda node: node.name != "linear")
    assert specs(quantizer)["layers.0.k_proj:linear"] == "-/-", "with the filter it is the first"


def test_the_recipe_with_ends():
    got = specs(MXQuantizer.from_recipe("mxfp4_first_last_mxfp8"))
    ends = {"layers.0.q_proj:linear", "lm_head:linear"}
    assert {name for name, spec in got.items() if spec == "fp8_e4m3/fp8_e4m3"} == ends
    assert {spec for name, spec in got.items() if name not in ends} == {"fp4_e2m1/fp4_e2m1"}


def test_attention_in_8_bits_and_weights_in_4():
    """Computed factors are activations: both factors of the matmuls of an unfused attention."""
    quantizer = MXQuantizer.from_recipe("mxfp4_weights_mxfp8_activations")
    got = specs(quantizer)
    matmuls = {name: spec for name, spec in got.items() if name.endswith(("bmm", "matmul"))}
    assert matmuls and set(matmuls.values()) == {"fp8_e4m3/fp8_e4m3"}
    assert {spec for name, spec in got.items() if name not in matmuls} == {"fp8_e4m3/fp4_e2m1"}
    fused = pt2mx.quantization_report(pt2mx.prepare_pt2e(exported(Attention(), *INPUTS), quantizer))
    assert [operand.spec for operand in fused.operators[0].operands] == ["mxfp8_e4m3{32}"] * 3


def test_reasons_for_unquantized_operators():
    quantizer = MXQuantizer().set_global(FP4).set_module_name("lm_head", None).set_module_type("Matmuls", FP8)
    refused = {"linear_1": False, "linear_2": "it is the second"}
    quantizer.set_filter_function(lambda node: refused.get(node.name, True))
    report = pt2mx.quantization_report(prepared(quantizer))
    reasons = {o.name: o.reason for o in report.operators}
    assert reasons["linear_2"] == "it is the second"
    assert reasons["linear_4"] == "excluded by module_name 'lm_head'"
    assert reasons["linear_1"] == "excluded by the filter function"
    assert reasons["linear"] is None
    alone = pt2mx.quantization_report(prepared(MXQuantizer().set_module_name("lm_head", FP4)))
    assert {o.reason for o in alone.operators if o.module != "lm_head"} == {"no setting matches it"}
    weight_only = pt2mx.quantization_report(prepared(MXQuantizer().set_global(FP4)))
    assert {o.reason for o in weight_only.operators if o.operator == "aten.bmm"} == {
        "the config names no spec for its operands"
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("module_name", "layers.0.qproj"), "module_name 'layers.0.qproj' matches no operator.*'layers.0.q_proj'"),
        (("module_name_regex", ".*foo"), "module_name_regex '.*foo' matches no operator"),
        (("module_type", "Liner"), "module_type 'Liner' matches no operator.*'Linear'"),
        (("operator_type", "aten.conv2d"), "operator_type 'aten.conv2d' matches no operator"),
        (("operator_type", "aten.add"), "operator_type 'aten.add' matches no operator"),
    ],
)
def test_a_setting_that_matches_nothing_is_reported(setting, message):
    kind, key = setting
    quantizer = MXQuantizer().set_global(FP8)
    getattr(quantizer, f"set_{kind}")(key, FP4)
    with pytest.warns(UserWarning, match=message):
        prepared(quantizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda q: q.set_global("mxfp4"), "expected an MXQuantizationConfig or None, not 'mxfp4'"),
        (lambda q: q.set_module_name("", FP4), "module_name must be a string"),
        (lambda q: q.set_module_name(nn.Linear, FP4), "module_name must be a string"),
        (lambda q: q.set_module_name_regex("(", FP4), "no regular expression"),
        (lambda q: q.set_module_name_regex(None, FP4), "no regular expression"),
        (lambda q: q.set_operator_type("aten.bm", FP4), "did you mean 'aten.bmm'"),
        (lambda q: q.set_operator_type(torch.ops.aten.relu.default, FP4), "'aten.relu' cannot be quantized"),
        (lambda q: q.set_operator_type("aten.ad", FP4), "did you mean 'aten.add'"),
        (lambda q: q.set_filter_function("conv"), "must be a function"),
        (lambda q: q.set_first(FP4, 0), "first: count=0 must be an integer of at least 1"),
        (lambda q: q.set_last(FP4, "2"), "last: count='2' must be"),
        (lambda q: q.set_last(FP4, True), "last: count=True must be"),
        (lambda q: q.set_first("mxfp4"), "expected an MXQuantizationConfig or None, not 'mxfp4'"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(MXError, match=message):
        make(MXQuantizer())


def test_inside_a_composable_quantizer():
    both = ComposableQuantizer([MXQuantizer().set_module_name("lm_head", FP4), MXQuantizer().set_global(FP8)])
    got = specs(both)
    assert got["lm_head:linear"] == "-/fp4_e2m1" and got["layers.0:bmm"] == "fp8_e4m3/fp8_e4m3"


@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_ste_of_a_config_reaches_training(ste):
    model, x = nn.Linear(32, 1, bias=False), torch.full((1, 32), 1.0)
    x[0, 0] = 7.9  # beyond 6 * 2**0, the largest value of its block in FP4
    config = get_default_mx_quantization_config("mxfp4", "mxfp4", ste=ste)
    qat = pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), MXQuantizer().set_global(config))
    assert {m.ste for m in qat.modules() if isinstance(m, pt2mx.MXFakeQuantize)} == {ste}
    x.requires_grad_()
    qat(x).sum().backward()
    weight = pt2mx.fake_quantize_mx(model.weight.detach(), "mxfp4")
    assert x.grad[0, 0] == (0 if ste == "clipped" else weight[0, 0]) and torch.equal(x.grad[0, 1:], weight[0, 1:])


@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
@pytest.mark.parametrize("quantizer", [MXQuantizer(), MXQuantizer().set_global(None)])
def test_a_quantizer_without_a_setting_says_that_it_quantizes_nothing(quantizer, prepare):
    model = exported(TwoLayers().eval(), *INPUTS)
    with pytest.warns(
        UserWarning, match=r"has no setting, so that it quantizes nothing: call set_global\(.*from_recipe"
    ):
        actual = prepare(model, quantizer)
    assert torch.equal(actual(*INPUTS), model(*INPUTS))


def test_a_quantizer_with_a_setting_says_nothing():
    only_type = MXQuantizer().set_module_type(nn.Linear, None)
    for quantizer in (MXQuantizer().set_global(FP8), only_type, MXQuantizer.from_recipe("mxfp8")):
        prepared(quantizer)
