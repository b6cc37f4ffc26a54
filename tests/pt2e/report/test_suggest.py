import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, suggest_config
from pt2mx.kernels.packing import packed_length
from tests.flow import calibrated
from tests.format_candidates import CANDIDATES, CONFIG
from tests.models import Depthwise, Encoder, chain, module_of, tied


def export(make, inputs):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.dim() > 1):
            if i % 3 == 1:  # binary: exact in every format
                parameter.copy_(0.25 * parameter.sign())
    return torch.export.export(model, inputs).module(), inputs


@functools.cache
def encoder():
    return export(Encoder, (torch.arange(48).reshape(2, 24) * 4,))


@functools.cache
def conv_net():
    return export(Depthwise, (torch.randn(2, 3, 12, 12),))


def calibrate(model, quantizer):
    """`model`: an exported one and its inputs."""
    graph, inputs = model
    return calibrated(graph, quantizer, *inputs)


def observed(model, config=CONFIG):
    return calibrate(model, MXQuantizer().set_global(config))


def noise(model, quantizer):
    """(weight bits, sum of noise / signal of the weights) under a quantizer."""
    report = pt2mx.quantization_report(calibrate(model, quantizer))
    weights = [w for o in report.operators for w in o.operands if w.role == "weight" and w.bytes_before]
    assert all(w.spec for w in weights)
    return report.weight_bits, sum(w.statistics.relative_noise for w in weights)


@pytest.mark.slow_cases("encoder")
@pytest.mark.parametrize("make", [encoder, conv_net])
def test_within_the_budget_and_less_noise_than_uniform_recipes(make):
    model = make()
    prepared = observed(model)
    better = 0
    for candidate in CANDIDATES:
        bits, uniform = noise(model, MXQuantizer().set_global(MXQuantizationConfig(weight=candidate)))
        got_bits, got = noise(model, suggest_config(prepared, bits))
        assert got_bits <= bits + 1e-9 and got <= uniform * (1 + 1e-9)
        better += got < 0.9 * uniform
    assert better >= 2


@pytest.mark.slow_cases("encoder")
@pytest.mark.parametrize("make", [encoder, conv_net])
def test_more_bits_less_noise(make):
    model = make()
    prepared = observed(model)
    smallest = noise(model, MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4")))[0]
    results = [noise(model, suggest_config(prepared, smallest + extra)) for extra in (0, 0.3, 1, 2, 3, 20)]
    for extra, (bits, _) in zip((0, 0.3, 1, 2, 3, 20), results, strict=True):
        assert bits <= smallest + extra + 1e-9
    powers = [power for _, power in results]
    assert powers == sorted(powers, reverse=True) and len(set(powers)) >= 3


def test_the_suggestion_is_a_recipe_and_converts_to_its_bits(tmp_path):
    model = encoder()
    quantizer = suggest_config(observed(model), 6, min_activation_sqnr=25)
    quantizer.to_recipe(tmp_path / "mixed.yaml")
    again = MXQuantizer.from_recipe(tmp_path / "mixed.yaml")
    assert again.to_recipe() == quantizer.to_recipe()
    prepared = calibrate(model, again)
    pt2mx.enable_fake_quant(prepared)
    converted = pt2mx.convert_pt2e(prepared)
    with torch.no_grad():
        assert torch.equal(converted(*model[1]), prepared(*model[1]))
    report = pt2mx.quantization_report(converted)
    assert report.weight_bits == pt2mx.quantization_report(prepared).weight_bits <= 6
    assert len({w.spec for o in report.operators for w in o.operands if w.role == "weight"}) >= 2
    assert "observer" not in quantizer.to_recipe()


def test_candidates_with_other_scales():
    model = encoder()
    candidates = ("mxfp4", "nvfp4", "fp8_e4m3{128}(f32)")
    observer = pt2mx.MXFormatObserver.with_args(candidates=candidates)
    prepared = observed(model, MXQuantizationConfig(weight="mxfp8", activation="nvfp4", observer=observer))
    quantizer = suggest_config(prepared, 4.6, min_activation_sqnr=17)
    prepared = calibrate(model, quantizer)
    report = pt2mx.quantization_report(prepared)
    specs = {w.spec for o in report.operators for w in o.operands if w.role == "weight"}
    assert "nvfp4_e2m1{16}" in specs and len(specs) > 1 and report.weight_bits <= 4.6
    pt2mx.enable_fake_quant(prepared)
    pt2mx.disable_observer(prepared)
    with torch.no_grad():
        converted = pt2mx.convert_pt2e(prepared)
        assert torch.equal(converted(*model[1]), prepared(*model[1]))
    assert pt2mx.quantization_report(converted).weight_bits == report.weight_bits


def test_modules_that_share_a_weight_get_one_choice():
    model = encoder()
    prepared = observed(model)
    chosen = set()
    for target in (4.3, 4.6, 5, 6, 7, 8):
        again = calibrate(model, suggest_config(prepared, target))
        operators = {o.module: o for o in pt2mx.quantization_report(again).operators}
        assert operators["embedding"].operands[0].spec == operators["head"].operands[1].spec
        chosen.add(operators["head"].operands[1].spec)
        weights = [name for name in pt2mx.convert_pt2e(again).state_dict() if name.endswith("_data")]
        assert len(weights) == 13
    assert len(chosen) >= 2


def test_activations_get_the_fewest_bits_of_a_sufficient_sqnr():
    model = encoder()
    prepared = observed(model)
    seen = {o.module: o for o in pt2mx.quantization_report(prepared).operators}
    report = pt2mx.quantization_report(calibrate(model, suggest_config(prepared, 8.25, min_activation_sqnr=22)))
    for operator in report.operators:
        for before, after in zip(seen[operator.module].operands, operator.operands, strict=True):
            if before.role != "activation":
                continue
            sqnr = {name: seen.sqnr for name, seen in before.candidates.items()}
            assert sqnr[after.spec] >= 22
            if operator.operator == "aten.linear":  # one activation
                smaller = [n for n in sqnr if pt2mx.parse(n).effective_bits < pt2mx.parse(after.spec).effective_bits]
                assert all(sqnr[name] < 22 for name in smaller)
    unchanged = pt2mx.quantization_report(calibrate(model, suggest_config(prepared, 8.25)))
    assert {a.spec for o in unchanged.operators for a in o.operands if a.role == "activation"} == {"mxfp8_e4m3{32}"}


def test_an_sqnr_out_of_reach_is_warned_about():
    with pytest.warns(UserWarning, match=r"SQNR of 300 dB for the activations of .*layers\.0\.up.*the highest"):
        quantizer = suggest_config(observed(encoder()), 8.25, min_activation_sqnr=300)
    report = pt2mx.quantization_report(calibrate(encoder(), quantizer))
    up = next(o for o in report.operators if o.module == "layers.0.up")
    assert up.operands[0].spec == "mxint8{32}"


def test_unquantized_modules_and_other_specs_do_not_change():
    model = encoder()
    config = MXQuantizationConfig(weight="mxfp8", bias="mxint8", output="mxint8", observer=CONFIG.observer)
    quantizer = MXQuantizer().set_module_name("layers.1", config).set_module_name("layers.1.attention", None)
    prepared = calibrate(model, quantizer)
    suggested = suggest_config(prepared, 6.25)
    assert all(c is None or (c.bias, c.output) == (config.bias, config.output) for c in settings(suggested).values())
    specs = {o.module: o.quantized for o in pt2mx.quantization_report(calibrate(model, suggested)).operators}
    assert [name for name, quantized in specs.items() if quantized] == ["layers.1.up", "layers.1.down"]


def test_specs_of_single_operands_make_room_for_the_choice():
    config = MXQuantizationConfig(
        weight="mxfp8", activation="mxfp8", operands={"weight": "mxint8", "query": "mxint8"}, observer=CONFIG.observer
    )
    suggested = suggest_config(calibrate(encoder(), MXQuantizer().set_global(config)), 4.5)
    kept = {name: dict(config.operands) for name, config in settings(suggested).items()}
    assert kept["layers.0.up"] == {}
    assert kept["layers.0.attention"] == {"query": pt2mx.parse("mxint8")}
    assert pt2mx.quantization_report(calibrate(encoder(), suggested)).weight_bits <= 4.5


def settings(quantizer):
    return quantizer._settings["module_name"]


def test_operators_of_the_root_and_of_modules_inside_an_excluded_one():
    def forward(self, x):
        return self.out(self.inner(functional.linear(x, self.weight)))

    def root():
        weight = nn.Parameter(torch.randn(32, 32))
        return module_of(forward, weight=weight, inner=nn.Linear(32, 32), out=nn.Linear(32, 32))

    model = export(root, (torch.randn(2, 32),))
    prepared = calibrate(model, MXQuantizer().set_global(CONFIG).set_module_name("inner", None))
    report = pt2mx.quantization_report(calibrate(model, suggest_config(prepared, 6.25)))
    assert [(o.module, o.quantized) for o in report.operators] == [("", True), ("inner", False), ("out", True)]
    assert report.weight_bits <= 6.25


def test_weights_without_candidates_count_towards_the_average():
    model = encoder()
    quantizer = MXQuantizer().set_global(CONFIG).set_module_name("layers.0", MXQuantizationConfig(weight="mxfp8"))
    prepared = calibrate(model, quantizer)
    report = pt2mx.quantization_report(calibrate(model, suggest_config(prepared, 6.5)))
    assert report.weight_bits <= 6.5
    first = [o.operands[1].spec for o in report.operators if o.module.startswith("layers.0.") and o.quantized]
    assert first == ["mxfp8_e4m3{32}"] * 6


def test_candidates_are_chosen_by_statistics():
    model = chain(exact=nn.Linear(64, 64, bias=False), wide=nn.Linear(64, 64, bias=False))
    model.exact.weight.data = torch.ones(64, 64)  # every format represents it
    prepared = calibrate(
        (torch.export.export(model, (torch.randn(2, 64),)).module(), (torch.randn(2, 64),)),
        MXQuantizer().set_global(CONFIG),
    )
    chosen = settings(suggest_config(prepared, 6.25))
    assert (str(chosen["exact"].weight), str(chosen["wide"].weight)) == ("mxfp4_e2m1{32}", "mxint8{32}")


def test_a_tensor_with_values_that_are_not_finite():
    model = chain(fc=nn.Linear(64, 8))
    model.fc.weight.data.fill_(math.nan)
    inputs = (torch.full((2, 64), math.inf),)
    prepared = calibrate((torch.export.export(model, inputs).module(), inputs), MXQuantizer().set_global(CONFIG))
    chosen = settings(suggest_config(prepared, 5, min_activation_sqnr=20))["fc"]
    assert (str(chosen.weight), str(chosen.activation)) == ("mxfp4_e2m1{32}", "mxfp4_e2m1{32}")


def test_errors():
    model = encoder()
    prepared = observed(model)
    for bad in ("6", None, True, math.nan):
        with pytest.raises(MXError, match=r"target_bits=.* must be a finite number"):
            suggest_config(prepared, bad)
    with pytest.raises(MXError, match="min_activation_sqnr='20' must be a finite number"):
        suggest_config(prepared, 6, min_activation_sqnr="20")
    with pytest.raises(MXError, match=r"target_bits=4 is below the smallest candidates.* 4\.25 to 8\.25 bits"):
        suggest_config(prepared, 4)
    for other in (model[0], Encoder(), None):
        with pytest.raises(MXError, match="expected a prepared model"):
            suggest_config(other, 6)
    with pytest.raises(MXError, match="prepared without format observers"):
        suggest_config(observed(model, MXQuantizationConfig(weight="mxfp8")), 6)
    with pytest.raises(MXError, match="has seen no batch"):
        suggest_config(pt2mx.prepare_pt2e(model[0], MXQuantizer().set_global(CONFIG)), 6)


def test_different_configs_in_one_module_are_refused():
    def forward(self, x):
        return functional.linear(x, self.weight) @ x.t()

    model = export(lambda: module_of(forward, weight=nn.Parameter(torch.randn(32, 32))), (torch.randn(4, 32),))
    prepared = calibrate(model, MXQuantizer().set_global(CONFIG).set_operator_type("aten.matmul", None))
    with pytest.raises(MXError, match="operators of the module '' were prepared with different configs"):
        suggest_config(prepared, 6)


def test_packing_and_short_blocks_are_counted():
    model = conv_net()
    names = "stem", "depth", "point", "head"
    weights = [model[0].get_parameter(f"{name}.weight") for name in names]
    values = sum(w.numel() for w in weights)
    lengths = [3 if name == "depth" else w.shape[1] for name, w in zip(names, weights, strict=True)]  # blocks of taps
    smallest = sum(w.numel() // n * (packed_length(n, 4) + -(-n // 32)) for w, n in zip(weights, lengths, strict=True))
    bits = 8 * smallest / values
    prepared = observed(model)
    assert noise(model, suggest_config(prepared, bits))[0] == bits
    with pytest.raises(MXError, match=f"can take {bits:.4g} to"):
        suggest_config(prepared, bits - 0.01)


def test_a_weight_that_subgraphs_share_counts_once():
    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)

    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    x, model = torch.randn(4, 32), tied(module_of(forward, first=first, second=second), "first", "second")
    model = torch.export.export(model.eval(), (x,)).module()
    prepared = pt2mx.prepare_pt2e(model, MXQuantizer().set_global(CONFIG))
    with torch.no_grad():
        prepared(x)
    suggested = suggest_config(prepared, 6)
    report = pt2mx.quantization_report(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, suggested)))
    assert report.weight_bits == 4.25
    assert [o.operands[1].spec for o in report.operators] == ["mxfp4_e2m1{32}"] * 2
