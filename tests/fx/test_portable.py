import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import FORMATS, MXError, MXQuantizer, MXSpec, get_default_mx_quantization_config
from pt2mx.fx.graph.qdq import is_portable
from pt2mx.fx.portable import without_calls
from pt2mx.kernels.select import USES
from pt2mx.ops.activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from pt2mx.ops.fp8_rowwise import layer_norm_fp8_rows, mm_fp8_rows, quantize_fp8_rows
from pt2mx.ops.linear import grouped_linear_mx, linear_mx
from tests.compare import sqnr
from tests.flow import WITHOUT_PT2MX, calibrated, convert, exported, reloaded
from tests.graph import namespaces
from tests.models import module_of, projected
from tests.subgraph_models import Cond, X

COMPILED_WITHOUT_PT2MX = """
import sys
sys.modules["pt2mx"] = None
import torch
for name in sys.argv[1:]:
    compiled = torch.compile(torch.export.load(f"{name}.pt2").module())
    with torch.no_grad():
        for x, want in torch.load(f"{name}.pt"):
            got = compiled(*x)
            print(all(map(torch.equal, got, want)))
"""
#: below, at and above the bounds of one and of two blocks
AROUND_BLOCKS = 2, 31, 32, 33, 63, 64, 65


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.table = nn.Conv2d(3, 5, 3), nn.Linear(5, 10), nn.Embedding(7, 10)

    def forward(self, x):  # (B, 3, H, W) -> (B, 10)
        return self.fc(torch.relu(self.conv(x)).mean((2, 3))) @ self.table.weight.t() + self.table.weight[0, 0]


@pytest.mark.parametrize("name", ["every", pytest.param("inner", marks=pytest.mark.slow)])
def test_runs_where_pt2mx_is_not_installed(name, tmp_path, run_python):
    """Every format with ragged blocks and a dynamic batch; a subgraph."""
    x = torch.randn(4, 3, 8, 8)
    config = get_default_mx_quantization_config
    every = (
        MXQuantizer().set_global(config("mxfp4", "mxfp6_e3m2")).set_module_name("fc", config("mxint8(mse)", "mxfp8"))
    )
    every.set_module_name("conv", config("mxfp6_e2m3", "mxfp8_e5m2(rceil,half_away)"))
    inner = MXQuantizer().set_global(config("mxfp4", "mxfp6"))
    cases = {"every": (Net().eval(), x, every), "inner": (Cond().eval(), X, inner)}
    model, inputs, quantizer = cases[name]
    dynamic = ({0: torch.export.Dim("batch")},) if name != "inner" else None
    converted = convert(model, (inputs,), quantizer, shapes=dynamic)
    with torch.no_grad():
        program = pt2mx.make_portable(torch.export.export(converted, (inputs,), dynamic_shapes=dynamic))
        inputs = inputs if dynamic is None else torch.randn(7, 3, 8, 8)
        want = converted(inputs)
    assert "pt2mx" not in namespaces(program.graph_module)
    assert name == "inner" or all(repr(element) in converted.code for element in FORMATS)
    torch.export.save(program, tmp_path / f"{name}.pt2")
    torch.save((inputs, want), tmp_path / f"{name}.pt")
    assert run_python(WITHOUT_PT2MX, [name], cwd=tmp_path).split() == ["True"]


class Quantized(nn.Module):
    """The operators themselves, along one axis: values, codes and scales, and a linear layer's weight."""

    def __init__(self, spec, axis=-1, **options):
        super().__init__()
        self.spec, self.axis, self.options = spec, axis, options

    def forward(self, *inputs):
        results = [pt2mx.fake_quantize_mx(x, self.spec, axis=self.axis, **self.options) for x in inputs]
        for x in () if self.options else inputs:
            scale, data = pt2mx.quantize_mx(x, self.spec, axis=self.axis)
            y = pt2mx.dequantize_mx(data, scale, self.spec, axis=self.axis, length=x.shape[self.axis])
            results += [scale.view(torch.uint8), data, y]
        return results


def of_length(n, axis):
    return torch.randn(3, 2, n).movedim(-1, axis).contiguous() * 3


KINDS = {
    **{f"{element}, {axis}": (element, axis) for element in FORMATS for axis in (-1, 0, 1)},
    "blocks of 12": (MXSpec("fp8_e4m3", 12), -1),
    "blocks of several rows": (MXSpec("fp8_e4m3", 32, block_rows=4), -1),
    "search": ("mxint8(mse)", -1),
    "half away, rounded up": ("mxfp8_e5m2(rceil,half_away)", -1),
}


@pytest.mark.compiled
@pytest.mark.slow_except("fp4_e2m1, -1", "int8, -1", "blocks of 12")
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_where_pt2mx_is_not_installed(kind, tmp_path, run_python):
    """Lengths below, at and above the bounds of blocks; a dynamic length, too, where all cases run."""
    spec, axis = KINDS[kind]
    model, lengths = Quantized(spec, axis), (1, 33) if kind == "int8, -1" else (1, 31, 33, 65)
    fixed = tuple(of_length(n, axis) for n in lengths)
    programs = {"fixed": (torch.export.export(model, fixed), [fixed])}
    if kind != "int8, -1":
        inputs = [(of_length(n, axis),) for n in AROUND_BLOCKS]
        dynamic = (({axis % 3: torch.export.Dim("n")},),)
        programs["dynamic"] = (torch.export.export(model, inputs[3], dynamic_shapes=dynamic), inputs)
    for name, (program, calls) in programs.items():
        torch.export.save(pt2mx.make_portable(program), tmp_path / f"{name}.pt2")
        torch.save([(x, model(*x)) for x in calls], tmp_path / f"{name}.pt")
    answers = run_python(COMPILED_WITHOUT_PT2MX, [*programs], cwd=tmp_path).split()
    assert answers == ["True"] * sum(len(calls) for _, calls in programs.values())


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8", "mxfp6", "mxfp4"])
@pytest.mark.parametrize("name", ["linear, 33", "conv, 5", "linear, 64"])
def test_a_compiled_model_with_ragged_activations(name, recipe, compiler):
    config = get_default_mx_quantization_config
    quantizer = MXQuantizer().set_global(config("mxint8", "mxint8"))
    quantizer = quantizer if recipe == "mxint8" else MXQuantizer.from_recipe(recipe)
    kind, channels = name.split(", ")
    model = nn.Linear(int(channels), 16) if kind == "linear" else nn.Conv2d(int(channels), 16, 3)
    x = torch.randn(8, int(channels)) if kind == "linear" else torch.randn(2, int(channels), 9, 9)
    converted = convert(model, (x,), quantizer)
    portable = pt2mx.make_portable(torch.export.export(converted, (x,))).module()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(portable)(x), converted(x), rtol=1e-5, atol=1e-5)


def product():
    return module_of(lambda self, a, b: a @ b)


def attention():
    """Attention by its formula, so that the keys' length is reduced."""
    return module_of(lambda self, q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


DYNAMIC = {
    "product": (product, lambda n: (torch.randn(4, n), torch.randn(n, 8)), ({1: 0}, {0: 0})),
    "attention": (attention, lambda n: (torch.randn(2, 3, n, 8),) * 3, ({2: 0},) * 3),
    "two lengths": (
        attention,
        lambda n: (torch.randn(2, 3, 5 + n, 8), torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)),
        ({2: 1}, {2: 0}, {2: 0}),
    ),
    "projected": (projected, lambda n: (torch.randn(3, n, 40),), ({1: 0},)),
    "batch and length": (projected, lambda n: (torch.randn(n, n + 1, 40),), ({0: 0, 1: 1},)),
}


@pytest.mark.compiled
@pytest.mark.slow_except("product-mxfp8-10")
@pytest.mark.parametrize("example", [10, 32, 33])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp6", "mxfp4"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_takes_the_lengths_that_the_program_takes(name, recipe, example):
    """No length of the example, and no number of its blocks, becomes a guard."""
    kind, inputs, dims = DYNAMIC[name]
    lengths = [torch.export.Dim(letter, min=2, max=600) for letter in "nm"]
    shapes = tuple({d: lengths[i] for d, i in of_input.items()} for of_input in dims)
    x = inputs(example)
    converted = convert(kind(), x, recipe, shapes=shapes)
    with torch.no_grad():
        program = torch.export.export(converted, x, dynamic_shapes=shapes)
        portable = pt2mx.make_portable(program)
        assert sorted(portable._guards_code) == sorted(program._guards_code)
        run = portable.module()
        for n in (*AROUND_BLOCKS, 500):
            x = inputs(n)
            torch.testing.assert_close(run(*x), converted(*x), rtol=1e-5, atol=1e-5)


def test_stochastic_rounding_by_its_seed():
    class Rounded(nn.Module):
        def forward(self, x):
            return pt2mx.fake_quantize_mx(x, "mxfp4(floor,stochastic)", seed=5)

    x = torch.randn(4, 70)
    program = pt2mx.make_portable(torch.export.export(Rounded(), (x,)))
    assert torch.equal(program.module()(x), Rounded()(x))


@pytest.mark.compiled
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("element", ["fp6_e2m3", "fp8_e4m3"])
@pytest.mark.parametrize("write_out", [pt2mx.make_portable, without_calls])
def test_matmuls_with_packed_weights(dtype, bias, write_out, element):
    """The experts of a mixture, and a layer with and without a bias; without pt2mx they dequantize their weight."""

    class Matmuls(nn.Module):
        def __init__(self):
            super().__init__()
            weights = {"dense": torch.randn(48, 70), "experts": torch.randn(3, 16, 48)}
            for name, weight in weights.items():
                scale, data = pt2mx.quantize_mx(weight, MXSpec(element, 32))
                self.register_buffer(f"{name}_data", data)
                self.register_buffer(f"{name}_scale", scale)
            self.bias = nn.Parameter(torch.randn(48, dtype=dtype), requires_grad=False) if bias else None

        def forward(self, x, offs):  # (T, 70), (3,) int32 -> (T, 16)
            x = linear_mx(x, self.dense_data, self.dense_scale, self.bias, element, 32, 0)
            experts = x, self.experts_data, self.experts_scale, offs, element, 32
            return grouped_linear_mx(*experts) + grouped_linear_mx(*experts, torch.float32)

    model, tokens = Matmuls(), torch.export.Dim("tokens")
    args = torch.randn(9, 70, dtype=dtype), torch.tensor([2, 2, 9], dtype=torch.int32)
    program = torch.export.export(model, args, dynamic_shapes=({0: tokens}, None))
    written = write_out(program)
    left = {str(n.target) for n in written.graph.nodes if str(n.target).startswith("pt2mx")}
    assert left == (set() if write_out is pt2mx.make_portable else {"pt2mx.dequantize_mx.default"})
    assert written.state_dict["dense_data"].dtype == torch.uint8
    for x in (args[0], torch.randn(40, 70, dtype=dtype)):
        offs = torch.tensor([2, 2, len(x)], dtype=torch.int32)
        want = model(x, offs)
        tolerance = 16 * torch.finfo(dtype).eps * want.abs().max().item()
        torch.testing.assert_close(written.module()(x, offs), want, rtol=0, atol=tolerance)


@pytest.mark.compiled_except("make_portable")
@pytest.mark.parametrize("write_out", [pt2mx.make_portable, without_calls])
def test_quantized_activations(write_out, monkeypatch):
    x = torch.randn(2048, 64)  # values enough for calls
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    monkeypatch.setitem(USES, "quantize the result of a matmul", {})  # as on most
    lowered_model = pt2mx.lower_to_inductor(convert(model.eval(), (x,), "mxfp8"))
    program = torch.export.export(lowered_model, (x,))
    assert {activation_fake_quantize_mx, layer_norm_fake_quantize_mx} <= {n.target for n in program.graph.nodes}
    written = write_out(program)
    left = {str(n.target) for n in written.graph.nodes if str(n.target).startswith("pt2mx")}
    inline = {"pt2mx.fake_quantize_mx.default", "pt2mx.dequantize_mx.default"}
    assert left <= (set() if write_out is pt2mx.make_portable else inline)
    assert sqnr(written.module()(x), lowered_model(x)) > 55


@pytest.mark.compiled_except("make_portable")
@pytest.mark.parametrize("write_out", [pt2mx.make_portable, without_calls])
def test_fp8_rowwise(write_out):
    class Rows(nn.Module):
        def forward(self, x, weight, weight_scale):  # (T, 64), (48, 64), (48, 1) -> (T, 48)
            y = mm_fp8_rows(*quantize_fp8_rows(x, "fp4_e2m1", "even", "even", "gelu"), weight, weight_scale)
            normed, *rows = layer_norm_fp8_rows(x, None, None, None, 1e-5, "fp6_e2m3", "floor", "even")
            return y + mm_fp8_rows(*rows, weight, weight_scale), normed

    args = torch.randn(9, 64), *quantize_fp8_rows(torch.randn(48, 64), "fp4_e2m1", "floor", "even", "none")[:2]
    program = torch.export.export(Rows(), args, strict=False)
    written = write_out(program)
    left = {str(n.target) for n in written.graph.nodes if str(n.target).startswith("pt2mx")}
    assert left == (set() if write_out is pt2mx.make_portable else {"pt2mx.fake_quantize_mx.default"})
    for got, want in zip(written.module()(*args), program.module()(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("program", [None, Net()])
def test_what_is_no_program(program):
    with pytest.raises(MXError, match="expected an ExportedProgram"):
        pt2mx.make_portable(program)


class Selected(nn.Module):
    """A matmul that reduces a data-dependent number of rows."""

    def forward(self, x, y, mask):
        rows = mask.nonzero().squeeze(1)
        return x[:, rows] @ y[rows]


class First(nn.Module):
    def forward(self, x, y, count):
        k = count.item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[1])
        return x[:, :k] @ y[:k]


class Operators(nn.Module):
    """Scales, codes and values themselves."""

    def forward(self, x, y, count):
        k = count.item()
        torch._check(k >= 0)
        torch._check(k <= y.shape[0])
        scale, data = pt2mx.quantize_mx(y[:k], "mxfp6", axis=0)
        return scale, data, pt2mx.dequantize_mx(data, scale, "mxfp6", axis=0, length=k)


def first(k):
    return torch.arange(100) < k


LENGTHS = (0, 1, 2, 31, 32, 33, 64, 99, 100)


_SELECTED, _FIRST = (Selected(), first), (First(), torch.tensor)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("model", "count", "formats"),
    [
        pytest.param(*_SELECTED, ("mxfp8", "mxfp8"), id="nonzero, 8 bits"),
        pytest.param(*_FIRST, ("mxfp4", "mxfp6"), id="item, 4 and 6 bits"),
        pytest.param(*_SELECTED, ("mxfp4", "mxfp6"), id="nonzero, 4 and 6 bits", marks=pytest.mark.slow),
        pytest.param(*_FIRST, ("mxfp8", "mxfp8"), id="item, 8 bits", marks=pytest.mark.slow),
    ],
)
def test_a_blocked_dimension_as_long_as_the_data_say(model, count, formats):
    x, y = torch.randn(4, 100), torch.randn(100, 8)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(*formats))
    prepared = calibrated(exported(model, x, y, count(70)), quantizer, x, y, count(70))
    converted = pt2mx.convert_pt2e(prepared)
    program = torch.export.export(converted, (x, y, count(70)))
    portable, lowered = pt2mx.make_portable(program).module(), pt2mx.lower_to_inductor(converted)
    for k in LENGTHS:
        want = converted(x, y, count(k))
        left, right = (pt2mx.fake_quantize_mx(t, formats[1], axis=a) for t, a in ((x[:, :k], 1), (y[:k], 0)))
        torch.testing.assert_close(want, left @ right)
        assert torch.equal(program.module()(x, y, count(k)), want) and torch.equal(portable(x, y, count(k)), want)
        assert torch.equal(lowered(x, y, count(k)), want)


@pytest.mark.compiled
def test_codes_and_scales_as_many_as_the_data_say():
    x, y = torch.randn(4, 100), torch.randn(100, 8)
    program = torch.export.export(Operators(), (x, y, torch.tensor(70)))
    portable = pt2mx.make_portable(program)
    for k in LENGTHS:
        for run in (program.module(), portable.module()):
            for got, want in zip(run(x, y, torch.tensor(k)), Operators()(x, y, torch.tensor(k)), strict=True):
                assert torch.equal(got, want)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("model", "count"),
    [
        pytest.param(Selected, first, id="nonzero"),
        pytest.param(First, torch.tensor, id="item", marks=pytest.mark.compiled),
    ],
)
def test_compiled_as_long_as_the_data_say(model, count, compiler):
    """The fake kernels of both traces must agree on which sizes are new symbols."""

    class Operands(nn.Module):
        def forward(self, x, y, count):
            k = count.item() if model is First else count.nonzero().shape[0]
            torch._check(k <= x.shape[1])
            torch._check(k >= 0)
            return pt2mx.quantize_mx(x[:, :k], "mxfp4")

    x, y = torch.randn(4, 100), torch.randn(100, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(Operands(), fullgraph=True)
        for k in LENGTHS:
            for got, want in zip(compiled(x, y, count(k)), Operands()(x, y, count(k)), strict=True):
                assert torch.equal(got, want)


@pytest.mark.compiled
def test_a_package_as_long_as_the_data_say(tmp_path):
    x, y = torch.randn(4, 100), torch.randn(100, 8)
    program = torch.export.export(Operators(), (x, y, torch.tensor(70)))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "operators.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for k in LENGTHS:
        given = x, y, torch.tensor(k)
        assert all(torch.equal(got, want) for got, want in zip(package(*given), Operators()(*given), strict=True))


@pytest.fixture(scope="module")
def quantized():
    """Linear's prepared model, its converted one, and the module of its portable program, saved and loaded."""
    x = torch.randn(2, 64)
    prepared = calibrated(exported(nn.Linear(64, 32), x), MXQuantizer.from_recipe("mxfp8"), x)
    converted = pt2mx.convert_pt2e(prepared)
    portable = pt2mx.make_portable(torch.export.export(converted, (x,)))
    return x, prepared, converted, reloaded(portable).module()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model, x: pt2mx.prepare_pt2e(model, MXQuantizer()), "belongs to a portable program, which is already"),
        (lambda model, x: pt2mx.lower_to_inductor(model), "not a portable program, whose operators are written out"),
    ],
)
def test_a_portable_program_is_no_model_to_prepare_or_lower(use, message, quantized):
    x, _, converted, portable = quantized
    assert is_portable(portable) and not is_portable(converted)
    for model in (portable, torch.export.export(portable, (x,)).module()):
        with pytest.raises(MXError, match=message):
            use(model, x)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda program: pt2mx.make_portable(program), r"an export of a prepared model: convert it \(convert_pt2e\)"),
        (lambda program: pt2mx.prepare_pt2e(program.module(), MXQuantizer()), "an export of a prepared one"),
        (lambda program: pt2mx.lower_to_inductor(program.module()), "one with observers, of a prepared model"),
    ],
)
def test_an_export_of_a_prepared_model_is_none_of_a_converted_one(use, message, quantized):
    x, prepared, *_ = quantized
    with torch.no_grad():
        program = torch.export.export(prepared, (x,))
    with pytest.raises(MXError, match=message):
        use(program)


def test_a_float_program_is_no_portable_one():
    x = torch.randn(2, 64)
    program = pt2mx.make_portable(torch.export.export(nn.Linear(64, 32), (x,)))
    assert not is_portable(program.graph_module)
    pt2mx.prepare_pt2e(program.module(), MXQuantizer.from_recipe("mxfp8"))
