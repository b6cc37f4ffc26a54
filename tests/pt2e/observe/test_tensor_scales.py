import copy
import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXObserver, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.observe.qspec import mx_qscheme, mx_qspec
from pt2mx.pt2e.observe.tensor_scales import StaticTensorScale
from tests.flow import calibrated, exported
from tests.graph import calls
from tests.models import module_of
from tests.pt2e.flow.test_scale_formats import BATCH, Net, X, fake_quantized

ops = torch.ops.pt2mx
NVFP4 = pt2mx.parse("nvfp4")
BATCHES = X, 3 * X, X / 2
#: rows on both sides of zero
X_OF_BOTH = torch.linspace(-4, 4, 8 * 64).reshape(8, 64)


def of_amax(*amax, spec=NVFP4):
    return pt2mx.tensor_scale_mx(torch.tensor(amax), spec)


def prepare(net, tensor_scale="static", prepare=pt2mx.prepare_pt2e, batches=BATCHES, spec="nvfp4"):
    config = MXQuantizationConfig(weight=spec, activation=spec, tensor_scale=tensor_scale)
    prepared = prepare(exported(net, X, dynamic_shapes=BATCH), MXQuantizer().set_global(config))
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return prepared


def test_the_amax_of_batches():
    x = torch.tensor([[-3.0, 1.0, math.inf, math.nan]])
    static, average = (StaticTensorScale(NVFP4, rule) for rule in ("static", "moving_average"))
    for batch in (x, 2 * x, x.bfloat16() / 4, torch.empty(0, 4)):
        static.observe(batch)
    assert static.amax == 6 and torch.equal(static.value("x"), of_amax(6.0))
    average.observe(x)
    average.observe(2 * x)
    assert average.amax == torch.tensor(3.0) + torch.tensor(0.01) * 3
    divisor = StaticTensorScale(pt2mx.parse("fp4_e2m1{16}(e4m3_f32_divisor)"), "static")
    divisor.observe(torch.tensor([2688.0 / 4]))
    assert divisor.value("x") == 4


@pytest.mark.parametrize("spec", ["nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)"])
def test_the_scale_after_no_finite_value_is_one(spec):
    scale = StaticTensorScale(pt2mx.parse(spec), "static")
    scale.observe(torch.full((2, 4), math.nan))
    assert scale.observed and not scale.is_known and scale.value("x") == 1


@pytest.mark.parametrize("rule", ["static", "moving_average"])
@pytest.mark.parametrize("without", [torch.empty(0, 4), torch.full((2, 4), math.nan), torch.full((2, 4), -math.inf)])
def test_a_batch_without_a_finite_value_changes_no_scale(rule, without):
    x = torch.tensor([[-3.0, 1.0, 2.0, 0.5]])
    for batches in ([without, x, 2 * x], [x, without, 2 * x], [x, 2 * x, without]):
        scale, want = StaticTensorScale(NVFP4, rule), StaticTensorScale(NVFP4, rule)
        for batch in batches:
            scale.observe(batch)
        for batch in (x, 2 * x):
            want.observe(batch)
        assert torch.equal(scale.amax, want.amax) and scale.is_known
    zero = StaticTensorScale(NVFP4, "moving_average")
    for batch in (x, 0 * x):  # zeros are values
        zero.observe(batch)
    assert zero.amax == torch.tensor(3.0) - torch.tensor(0.01) * 3


def experts(self, x):
    """Two layers; each gets the rows on its side of zero, which may be none."""
    is_low = x[:, 0] < 0
    return self.low(x[is_low]).sum() + self.high(x[~is_low]).sum()


def prepared_experts(prepare, rule):
    config = MXQuantizationConfig(weight="nvfp4", activation="nvfp4", tensor_scale=rule)
    torch.manual_seed(0)
    return prepare(
        exported(module_of(experts, low=nn.Linear(64, 32), high=nn.Linear(64, 32)), X_OF_BOTH),
        MXQuantizer().set_global(config),
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("rule", ["static", "moving_average"])
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_an_expert_without_a_token_keeps_its_scale(prepare, rule):
    model, first = prepared_experts(prepare, rule), X_OF_BOTH[:4].repeat(2, 1)
    model(first)  # all of them low: no token for the other expert
    report = pt2mx.quantization_report(model)
    assert [o.operands[0].tensor_scale for o in report.operators] == [of_amax(first.abs().max()).item(), None]
    with pytest.raises(MXError, match=r"tensor scale of index_1 .*no batch was seen in which it has a finite value"):
        pt2mx.convert_pt2e(model)
    model(X_OF_BOTH)
    converted = pt2mx.convert_pt2e(model)
    assert torch.equal(converted.index_1_tensor_scale, of_amax(X_OF_BOTH[4:].max()))
    pt2mx.enable_fake_quant(model)
    with torch.no_grad():
        want = model.eval()(X_OF_BOTH)
        assert torch.equal(converted(X_OF_BOTH), want) and torch.equal(converted(first), model(first))


@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize("spec", ["nvfp4", "nvfp4(four_six)", "fp4_e2m1{16}(e4m3_f32_divisor)"])
def test_calibration_fixes_the_tensor_scales_of_activations(spec, tmp_path):
    net = Net().eval()
    prepared = prepare(net, spec=spec)
    with torch.no_grad():
        inner = nn.functional.gelu(net.norm(net.up(3 * X)))  # in high precision, as calibration sees it
    want = {"x": of_amax((3 * X).abs().max(), spec=spec), "gelu": of_amax(inner.abs().max(), spec=spec)}
    pt2mx.enable_fake_quant(prepared)
    with torch.no_grad():
        prepared(10 * X)  # observed, and no calibration
    converted = pt2mx.convert_pt2e(prepared)
    for name, scale in want.items():
        assert torch.equal(converted.state_dict()[f"{name}_tensor_scale"], scale)
    pairs = [node.args for node in calls(converted, ops.quantize_mx.default)]
    assert [args[-1].target for args in pairs] == ["x_tensor_scale", "gelu_tensor_scale"]
    with torch.no_grad():
        for x in BATCHES:
            assert torch.equal(converted(x), prepared(x))
        got = converted(X)
        program = torch.export.export(converted, (X,), dynamic_shapes=BATCH)
        pt2mx.save_program(program, tmp_path / "net.pt2")
        assert torch.equal(pt2mx.load_program(tmp_path / "net.pt2").module()(X), got)
        lowered = pt2mx.lower_to_inductor(converted)
        torch.testing.assert_close(lowered(X), got, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pt2mx.make_portable(program).module()(X), got)
    assert not calls(lowered, ops.tensor_scale_mx.default)
    # the definition, with the scales of calibration in place of the tensors' own scales
    layer = pt2mx.fake_quantize_mx(X, spec, tensor_scale=want["x"]), pt2mx.fake_quantize_mx(net.up.weight, spec)
    assert torch.equal(prepared.get_submodule("activation_post_process_0")(X), layer[0])
    up = nn.functional.gelu(net.norm(nn.functional.linear(*layer, net.up.bias)))
    up = pt2mx.fake_quantize_mx(up, spec, tensor_scale=want["gelu"])
    assert torch.equal(got, nn.functional.linear(up, pt2mx.fake_quantize_mx(net.down.weight, spec), net.down.bias))


def test_the_report_says_that_calibration_wrote_numbers():
    prepared = prepare(Net().eval())
    converted = pt2mx.convert_pt2e(prepared)
    scale = converted.x_tensor_scale.item()
    for model in (prepared, converted):
        report = pt2mx.quantization_report(model)
        activation, weight = report.operators[0].operands[:2]
        assert (activation.tensor_scale, weight.tensor_scale) == (scale, None)
        assert report.summary.endswith("; 2 static tensor scales from calibration")
    dynamic = pt2mx.quantization_report(prepare(Net().eval(), "dynamic"))
    assert dynamic.operators[0].operands[0].tensor_scale is None and "static" not in dynamic.summary


def test_a_dynamic_scale_is_that_of_each_tensor():
    net = Net().eval()
    converted = pt2mx.convert_pt2e(prepare(net, "dynamic", batches=()))
    for x in BATCHES:
        with torch.no_grad():
            assert torch.equal(converted(x), fake_quantized(net, x, "nvfp4", "nvfp4"))


def test_without_a_batch_there_is_no_static_scale():
    prepared = prepare(Net().eval(), batches=())
    message = "tensor scale of x in nvfp4_e2m1.16.*no batch was seen in .*: run .*tensor_scale='dynamic'"
    with pytest.raises(MXError, match=message):
        pt2mx.convert_pt2e(prepared)
    pt2mx.disable_observer(prepared)
    pt2mx.enable_fake_quant(prepared)
    with pytest.raises(MXError, match="no batch was seen"):
        prepared(X)
    weight_only = MXQuantizer().set_global(MXQuantizationConfig(weight="nvfp4"))
    pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported(Net().eval(), X), weight_only))


def test_a_state_dict_keeps_the_scales():
    net = Net().eval()
    prepared, again = prepare(net), prepare(net, batches=())
    again.load_state_dict(prepared.state_dict())
    with torch.no_grad():
        want = pt2mx.convert_pt2e(prepared)(X)
        assert torch.equal(pt2mx.convert_pt2e(again)(X), want)
        assert torch.equal(pt2mx.convert_pt2e(copy.deepcopy(prepared))(X), want)


def test_the_scale_follows_training_and_stays_in_evaluation():
    model = prepare(Net(), prepare=pt2mx.prepare_qat_pt2e)
    amax = model.get_submodule("activation_post_process_0").static_scale.amax
    assert amax == (3 * X).abs().max()
    model.eval()
    model(10 * X)
    assert amax == (3 * X).abs().max()
    model.train()
    model(10 * X).sum().backward()
    assert amax == (10 * X).abs().max()
    weights = [m for name, m in model.named_modules() if isinstance(m, MXFakeQuantize) and m.static_scale is None]
    assert len(weights) == 2
    model.eval()
    with torch.no_grad():
        assert torch.equal(pt2mx.convert_pt2e(model)(X), model(X))


@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_gradients_beyond_a_static_scale(ste):
    observer = MXFakeQuantize(mx_qscheme(NVFP4, ste, "static"))
    observer(torch.full((16,), 6.0))
    x = torch.linspace(-12, 12, 32, requires_grad=True)
    observer.eval()(x).sum().backward()
    inside = (x.abs() <= 6).float()
    assert torch.equal(x.grad, torch.ones(32) if ste == "identity" else inside)


@pytest.mark.compiled
def test_compiled_training_is_one_graph_with_the_bits_of_eager(compiler):
    model = prepare(Net(), prepare=pt2mx.prepare_qat_pt2e, batches=BATCHES[:1])
    before, results = copy.deepcopy(model.state_dict()), []
    for module in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.load_state_dict(before)
        model.zero_grad()
        y = module(3 * X)
        y.square().sum().backward()
        results.append([y, *model.buffers(), *(p.grad for p in model.parameters())])
        results[-1] = [copy.deepcopy(tensor.detach()) for tensor in results[-1]]
    assert all(map(torch.equal, *results))


def test_subgraphs():
    def branches(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), self.b, (x,))

    x = torch.randn(4, 64)
    x = x if x.sum() > 0 else -x
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight="nvfp4", activation="nvfp4"))
    torch.manual_seed(0)
    prepared = calibrated(
        exported(module_of(branches, a=nn.Linear(64, 32), b=nn.Linear(64, 32)).eval(), x), quantizer, x
    )
    with pytest.raises(MXError, match="no batch was seen"):  # by the other branch
        pt2mx.convert_pt2e(prepared)
    with torch.no_grad():
        prepared(-2 * x)
        pt2mx.disable_observer(prepared)
        pt2mx.enable_fake_quant(prepared)
        want = prepared(x), prepared(-x)
        converted = pt2mx.convert_pt2e(prepared)
        again = torch.export.export(converted, (x,)).module()
        lowered = pt2mx.lower_to_inductor(converted)
        for model in (converted, again):
            assert torch.equal(model(x), want[0]) and torch.equal(model(-x), want[1])
        torch.testing.assert_close((lowered(x), lowered(-x)), want, rtol=1e-5, atol=1e-5)
    operands = [operand for o in pt2mx.quantization_report(converted).operators for operand in o.operands]
    scales = {operand.tensor_scale for operand in operands if operand.role == "activation"}
    assert scales == {of_amax(x.abs().max()).item(), of_amax(2 * x.abs().max()).item()}


def test_annotations():
    qscheme = mx_qspec("nvfp4", tensor_scale="static").qscheme
    assert qscheme != mx_qspec("nvfp4").qscheme and MXObserver(qscheme).static_scale.rule == "static"
    assert mx_qspec("mxfp4", tensor_scale="static").qscheme == mx_qspec("mxfp4").qscheme
    assert MXObserver(mx_qspec("nvfp4").qscheme).static_scale is None
    for make in (lambda n: mx_qspec("nvfp4", tensor_scale=n), lambda n: MXQuantizationConfig(tensor_scale=n)):
        for name, hint in (("statik", "did you mean 'static'"), (None, "allowed")):
            with pytest.raises(MXError, match=f"unknown tensor_scale {name!r}.*{hint}"):
                make(name)


def test_recipes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "global:\n"
        "  weight: {element: fp4_e2m1, block_size: 16, scale_format: e4m3_f32}\n"
        "  activation: nvfp4(four_six)\n"
        "  tensor_scale: moving_average\n"
        "operator_type:\n"
        "  aten.embedding: {weight: {element: fp8_e4m3, block_size: 128, block_rows: 128, scale_format: f32}}\n"
    )
    quantizer = MXQuantizer.from_recipe(path)
    config = MXQuantizationConfig("nvfp4(four_six)", "nvfp4", tensor_scale="moving_average")
    embedding = MXQuantizationConfig(weight="fp8_e4m3{128x128}(f32)")
    want = MXQuantizer().set_global(config).set_operator_type(torch.ops.aten.embedding.default, embedding)
    assert quantizer.to_dict() == want.to_dict()
    quantizer.to_recipe(tmp_path / "again.yaml")
    assert MXQuantizer.from_recipe(tmp_path / "again.yaml").to_dict() == quantizer.to_dict()
