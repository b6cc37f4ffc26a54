import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.fx import lower
from pt2mx.fx.graph.node import LinearMX
from pt2mx.fx.passes.fuse_activation_quantize import fuse_activation_quantize
from pt2mx.kernels.cpu import linear as linear_of_cpu
from pt2mx.kernels.cpu import uses
from pt2mx.kernels.cpu.linear import AMX, AVX512_BF16, INT8
from pt2mx.kernels.cpu.uses import integers_are_faster
from pt2mx.kernels.select import USES
from pt2mx.ops.hadamard import rotated_fake_quantize_mx
from pt2mx.ops.linear import linear_mx
from tests.compare import gradient_of, relative_error
from tests.flow import convert
from tests.graph import calls, count
from tests.models import BATCH, chain, module_of
from tests.subgraph_models import QUANTIZER, Cond, X

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def without_fused_activations(monkeypatch):
    steps = [step for step in lower.PASSES if step.graph_pass is not fuse_activation_quantize]
    monkeypatch.setattr(lower, "PASSES", steps)


@pytest.fixture(autouse=True)
def small_matmuls_on_every_machine(monkeypatch):
    monkeypatch.setattr(uses, "integers_are_faster", lambda *sizes: True)


def net():
    return chain(up=nn.Linear(64, 160), gelu=nn.GELU(), down=nn.Linear(160, 48))


def lowered(name, model=None, shape=(80, 64), **options):
    x = torch.randn(shape)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    converted = convert(model or net(), (x,), quantizer, shapes=BATCH)
    return converted, lower_to_inductor(converted, **options), x


@pytest.mark.parametrize("name", ["mxfp8", "mxint8", "mxfp6_e3m2", "mxfp4", "mxfp8_e5m2(rceil,half_away)"])
def test_x_is_quantized_to_bfloat16(name):
    converted, model, x = lowered(name)
    for matmul in calls(model, linear_mx):
        assert matmul.args[0].target is rotated_fake_quantize_mx and matmul.args[0].args[1] == 1
        assert matmul.args[0].meta["val"].dtype == torch.bfloat16 and matmul.args[-1] == torch.float32
        assert matmul.meta["val"].dtype == torch.float32
    assert count(model, linear_mx) == 2 and not count(model, ops.fake_quantize_mx)
    assert model(x).dtype == torch.float32
    torch.testing.assert_close(model(x), converted(x), rtol=1e-5, atol=1e-5)


def test_values_are_those_of_the_quantization():
    _, model, x = lowered("mxint8")
    (first, _) = calls(model, rotated_fake_quantize_mx)
    assert torch.equal(
        rotated_fake_quantize_mx(x, *first.args[1:]).float(),
        ops.fake_quantize_mx(x, "int8", 32, -1, "floor", "even", None, "identity"),
    )


@pytest.mark.parametrize(
    ("dtype", "isa", "result"),
    [
        (torch.bfloat16, AVX512_BF16, torch.bfloat16),
        (torch.bfloat16, AVX512_BF16 | INT8, torch.bfloat16),
        (torch.bfloat16, AVX512_BF16 | AMX, None),  # which multiplies no faster than torch
        (torch.bfloat16, INT8, None),
        (torch.bfloat16, 0, None),
        (torch.float16, AVX512_BF16, None),
    ],
)
def test_other_dtypes(dtype, isa, result, monkeypatch):
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: isa)
    monkeypatch.setattr(uses, "are_integers", lambda k, *specs: False)
    x, quantizer = torch.randn(80, 64, dtype=dtype), MXQuantizer.from_recipe("mxfp8")
    converted = convert(net().to(dtype), (x,), quantizer)
    model = lower_to_inductor(converted)
    assert {matmul.args[-1] for matmul in calls(model, linear_mx)} == {result}
    assert relative_error(model(x), converted(x).double()) < 0.01


def test_few_rows_stay():
    """Vectors multiply them; how many an unknown number is shows later."""
    for shapes, dtype in ((None, None), (BATCH, torch.float32)):
        model = lower_to_inductor(convert(net(), (torch.randn(32, 64),), "mxfp8", shapes=shapes))
        assert {matmul.args[-1] for matmul in calls(model, linear_mx)} == {dtype}


@pytest.fixture(params=[True, False])
def integers(request, monkeypatch):
    """Whether the machine multiplies codes of INT8 and FP4 as integers."""
    names = ("int8", "fp4_e2m1") if request.param else ()
    monkeypatch.setattr(uses, "are_integers", lambda k, *specs: all(spec.element.name in names for spec in specs))
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: 0)
    return request.param


def test_integers_in_bfloat16(integers):
    x = torch.randn(80, 64, dtype=torch.bfloat16)
    for activation, weight in (("mxint8", "mxint8"), ("mxfp8", "mxint8"), ("mxint8", "mxfp8")):
        quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight, activation))
        converted = convert(net().bfloat16(), (x,), quantizer)
        model = lower_to_inductor(converted)
        both = integers and activation == weight
        assert {matmul.args[-1] for matmul in calls(model, linear_mx)} == {torch.bfloat16 if both else None}
        assert count(model, rotated_fake_quantize_mx) == 2 * both
        assert relative_error(model(x), converted(x).double()) < 0.01


def test_integers_that_others_read_stay_where_they_are(integers):
    def forward(self, x):
        y = ops.fake_quantize_mx(x, "int8", 32, -1, "floor", "even", None, "identity")
        return self.linear(y) + y

    x = torch.randn(80, 64, dtype=torch.bfloat16)
    shared = module_of(forward, linear=nn.Linear(64, 64)).bfloat16()
    model = lower_to_inductor(convert(shared, (x,), "mxfp4_weight_only"))
    (matmul,) = calls(model, linear_mx)
    assert matmul.args[0].target is ops.fake_quantize_mx and (matmul.args[-1] == torch.bfloat16) == integers


def test_few_rows_of_integers(integers):
    """More rows than the vector kernel multiplies."""
    for rows in (4, 5):
        model = lower_to_inductor(convert(net(), (torch.randn(rows, 64),), "mxint8"))
        dtype = torch.float32 if integers and rows > 4 else None
        assert {matmul.args[-1] for matmul in calls(model, linear_mx)} == {dtype}


def test_weights_alone_stay():
    x = torch.randn(80, 64)
    model = lower_to_inductor(convert(net(), (x,), "mxfp4_weight_only"))
    assert {matmul.args[-1] for matmul in calls(model, linear_mx)} == {None}


def test_what_the_kernels_do_not_decode_stays():
    """The kernels do not decode blocks that are no whole groups of 32."""
    _, model, _ = lowered("mxfp8{20}")
    assert {matmul.args[-1] for matmul in calls(model, linear_mx)} <= {None}


def test_values_with_other_readers_are_cast():
    def forward(self, x):
        y = ops.fake_quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even", None, "identity")
        return self.linear(y) + y

    x = torch.randn(80, 64)
    converted = convert(module_of(forward, linear=nn.Linear(64, 64)), (x,), "mxfp8")
    model = lower_to_inductor(converted)
    (matmul,) = calls(model, linear_mx)
    assert matmul.args[-1] == torch.float32 and matmul.args[0].meta["val"].dtype == torch.bfloat16
    torch.testing.assert_close(model(x), converted(x), rtol=1e-5, atol=1e-5)


def test_graphs_inside(quantize):
    _, _, converted = quantize(torch.export.export(Cond().eval(), (X,)), QUANTIZER, (X,))
    model = lower_to_inductor(converted)
    for x in (X, -X):
        torch.testing.assert_close(model(x), converted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("served", [True, False])
def test_unpacking_leaves_them_to_bfloat16_instructions(served, monkeypatch):
    monkeypatch.setitem(USES, "multiply by packed weights", {"cpu": ""} if served else {})
    converted, model, x = lowered("mxfp8", unpack=True)
    assert (count(model, linear_mx), count(model, aten.linear.default)) == ((2, 0) if served else (0, 2))
    torch.testing.assert_close(model(x), converted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("rows", [3, 80, 200])
def test_compiled_and_eager_agree(rows):
    converted, model, x = lowered("mxfp4", shape=(rows, 64))
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True)(x)
    assert relative_error(got, converted(x).double()) < 0.02  # gelu differs in its last bits, so one FP4 value differs


def test_autocast_decides_the_dtype():
    _, model, x = lowered("mxfp8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(x)
    assert got.dtype == torch.bfloat16 and relative_error(got, model(x).double()) < 0.03


def test_a_gradient_passes():
    converted, model, x = lowered("mxfp8")
    assert relative_error(gradient_of(model, x), gradient_of(converted, x)) < 0.02


@pytest.mark.compiled
def test_saved_and_portable(tmp_path):
    converted, model, x = lowered("mxfp6_e2m3")
    program = torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "net.pt2")
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(x), model(x))
    portable = pt2mx.make_portable(program).module()
    torch.testing.assert_close(portable(x), converted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "dtype"), [("mxint8", torch.float32), ("mxfp8", None)])
def test_a_processor_that_multiplies_integers_alone(activation, dtype, monkeypatch):
    def units(spec, k):
        return linear_of_cpu.INT8 if spec.element.name in ("int8", "fp4_e2m1") else 0

    for module in (linear_of_cpu, uses):
        monkeypatch.setattr(module, "isa_for", units)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp4", activation))
    x = torch.randn(80, 64)
    converted = convert(net(), (x,), quantizer)
    low = lower_to_inductor(converted)
    assert {LinearMX.expect(matmul).target_dtype for matmul in calls(low, linear_mx)} == {dtype}
    assert relative_error(low(x), converted(x)) < 1e-6


@pytest.mark.parametrize(("rows", "dtype"), [(32, torch.float32), (80, None)])
def test_small_matmuls_stay_where_integers_are_slower(rows, dtype, monkeypatch):
    monkeypatch.setattr(uses, "integers_are_faster", integers_are_faster)
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: INT8)
    low = lower_to_inductor(convert(net(), (torch.randn(rows, 64),), "mxint8"))
    assert {LinearMX.expect(matmul).target_dtype for matmul in calls(low, linear_mx)} == {dtype}
