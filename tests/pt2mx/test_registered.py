"""Elements and scale modes that a process registers: names, graphs, files, and which kernels compute them."""

import pytest
import torch

import pt2mx
from pt2mx import (
    ELEMENTS,
    MXError,
    MXSpec,
    dequantize_mx,
    fake_quantize_mx,
    quantize_mx,
    register_element,
    register_scale_mode,
)
from pt2mx.algorithms.learned_rounding import LatentWeight
from pt2mx.compat import PRESETS
from pt2mx.kernels import select
from pt2mx.kernels.reference import to_blocks
from pt2mx.modes import ROUNDINGS
from tests.own_formats import NF4, OWN

#: registers in another process
REGISTER = f"import torch, pt2mx; pt2mx.register_element('own_nf4', values={NF4})\n"


pytestmark = pytest.mark.usefixtures("own_elements")


def of_mean(blocks, element):
    return blocks.abs().mean(-1) * 2 / element.max_normal


def converted(recipe):
    """Return a converted model, its input and its output."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).eval()
    x = torch.randn(8, 128)
    exported = torch.export.export(model, (x,)).module()
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe(recipe))
    prepared(x)
    return prepared, pt2mx.convert_pt2e(prepared), x


def test_rows_of_the_table():
    for name, element in ((name, ELEMENTS[name]) for name in OWN):
        assert element.name == name and element.is_registered and register_element(name, **OWN[name]) is element
        assert pt2mx.parse_element(f"MX{name}") is element and pt2mx.parse(f"nv{name}").element is element
        for mode in ("floor", "mse"):
            spec = MXSpec(name, 48, scale_mode=mode, rounding="up")
            assert pt2mx.parse(str(spec)) == spec and not spec.has_kernels
    nf4, e4m3, e5m2, int12 = (ELEMENTS[name] for name in ("own_nf4", "own_e4m3", "own_e5m2", "own_int12"))
    assert (nf4.bits, nf4.emax, nf4.max_normal, nf4.lowest) == (4, 0, 1.0, -1.0)
    assert (e4m3.emax, e4m3.max_code, e4m3.emin) == (4, 0x7E, -10)
    assert (e5m2.emax, e5m2.max_normal, e5m2.max_code) == (15, 57344.0, 0x7B)
    assert (int12.bits, int12.lowest) == (12, -2.0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("own", "built_in"), [("own_int4", "int4_full"), ("own_e5m2", "fp8_e5m2")])
def test_the_values_of_a_built_in_element_give_its_codes(own, built_in, rounding):
    x = torch.randn(9, 70) * torch.logspace(-20, 20, 9).unsqueeze(1)
    for mode in ("floor", "mse"):
        modes = {"scale_mode": mode, "rounding": rounding, "seed": 5}
        for got, want in zip(quantize_mx(x, own, **modes), quantize_mx(x, built_in, **modes), strict=True):
            assert torch.equal(got, want)


def test_nf4_is_that_of_bitsandbytes():
    """Blocks of 64 by their largest magnitude: each value is the code of the nearest number, two codes a byte."""
    x = torch.randn(4, 130)
    scale, data = quantize_mx(x, "own_nf4{64}(f32)")
    blocks = to_blocks(x, MXSpec("own_nf4", 64, 1))
    assert data.shape == (4, 65) and torch.equal(scale, blocks.abs().amax(-1))
    codes = (blocks / scale.unsqueeze(-1)).unsqueeze(-1).sub(torch.tensor(NF4)).abs().argmin(-1)
    want = torch.tensor(NF4)[codes] * scale.unsqueeze(-1)
    assert torch.equal(dequantize_mx(data, scale, "own_nf4{64}(f32)"), want.flatten(1)[:, :130])


def test_stochastic_rounding_to_a_codebook_keeps_the_mean():
    x = torch.tensor([1.0, *[0.03] * 40000, *[-0.6] * 40000])
    y = fake_quantize_mx(x, "own_nf4", len(x), rounding="stochastic", seed=1)
    assert y[1:40001].unique().tolist() == [0.0, NF4[8]] and y[40001:].unique().tolist() == [NF4[1], NF4[2]]
    assert y[1:40001].mean().item() == pytest.approx(0.03, abs=1e-3)
    assert y[40001:].mean().item() == pytest.approx(-0.6, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fp4", {"values": [0, 1]}, "'fp4' is a spelling of pt2mx's own elements"),
        ("int20", {"values": [0, 1]}, "'int20' is a spelling"),
        ("float8_e5m2", {"values": [0, 1]}, "is a spelling"),
        ("mxa", {"values": [0, 1]}, "not with mx, nv or bfp"),
        ("A", {"values": [0, 1]}, "lower-case letters"),
        (None, {"values": [0, 1]}, "name=None"),
        ("own_nf4", {"values": [0, 1]}, "'own_nf4' is registered as"),
        ("new", {}, "give mantissa_bits, of a float or an integer, or values, of a codebook"),
        ("new", {"mantissa_bits": 16}, "mantissa_bits=16 must be an integer from 1 to 15"),
        ("new", {"values": [1, 2]}, "among them 0"),
        ("new", {"values": [0, -1]}, "a positive one"),
        ("new", {"values": [0, 1, 1 + 1e-9]}, "different numbers"),
        ("new", {"values": range(257)}, "2 to 256"),
        ("new", {"values": [0, float("nan")]}, "magnitudes from 2**-70 to 2**64"),
        ("new", {"values": [0, 1e300]}, "magnitudes from 2**-70 to 2**64"),
        ("new", {"values": [0, "one"]}, "float32 represents"),
        ("new", {"values": (v for v in (0, 1, 1))}, "different numbers"),
        ("new", {"values": None}, "values=None must be a list of numbers"),
        ("new", {"values": torch.tensor(1.0)}, "must be a list of numbers"),
        ("new", {"values": [0, 1], "bias": 3}, "leave out the arguments of floats"),
        ("new", {"exponent_bits": 8, "mantissa_bits": 3}, "exponent_bits=8 must be an integer from 0 to 7"),
        ("new", {"exponent_bits": 4, "mantissa_bits": 12}, "from 0 to 11"),
        ("new", {"exponent_bits": 4, "mantissa_bits": 3, "max_normal": 449}, "max_normal=449 is no normal number"),
        ("new", {"exponent_bits": 4, "mantissa_bits": 3, "max_normal": 480, "has_nan": True}, "has_nan=True"),
        ("new", {"exponent_bits": 4, "mantissa_bits": 3, "max_normal": -2}, "max_normal=-2 must be"),
        ("new", {"exponent_bits": 4, "mantissa_bits": 3, "full_range": True}, "full_range=True is of integers"),
        ("new", {"mantissa_bits": 3, "bias": 2}, "are of floats"),
        ("new", {"exponent_bits": 4, "mantissa_bits": 3, "bias": 70}, "2**-70 or more"),
    ],
)
def test_what_is_no_element(name, arguments, message):
    with pytest.raises(MXError) as error:
        register_element(name, **arguments)
    assert message in str(error.value) and "new" not in ELEMENTS


def test_unknown_names_tell_of_registered_ones():
    with pytest.raises(MXError, match="did you mean 'own_nf4'"):
        pt2mx.parse("own_nf5")
    with pytest.raises(MXError, match="did you mean 'own_nf4'"):
        pt2mx.MXQuantizer.from_recipe("own_nf5")


def test_scale_modes():
    """The function's scale is of the element's values, whatever the scale format."""
    register_scale_mode("of_mean", of_mean)
    register_scale_mode("of_mean", of_mean)
    x = torch.randn(3, 64)
    for text in ("mxfp4(of_mean)", "int4{32}(of_mean,f32)", "nvfp4(of_mean)", "own_nf4{16}(of_mean,bf16)"):
        spec = pt2mx.parse(text)
        assert spec.is_registered and pt2mx.parse(str(spec)) == spec
        unit = spec.element.unit
        want = of_mean(x.unflatten(1, (-1, spec.block_size)), spec.element) * unit
        t = pt2mx.tensor_scale_mx(x, spec) if spec.has_tensor_scale else None
        scale, data = quantize_mx(x, spec, tensor_scale=t)
        if spec.has_e8m0_scale:
            assert torch.equal(scale, (want.log2().floor() + 127).to(torch.uint8))
        elif text.startswith("int4"):
            assert torch.equal(scale, want)
        y = dequantize_mx(data, scale, spec, tensor_scale=t)
        assert torch.equal(y, fake_quantize_mx(x, spec, tensor_scale=t))
        assert (y - x).square().mean() < 0.3


def test_blocks_that_a_scale_mode_refuses_become_nan():
    def refuses(blocks, element):
        return torch.where(blocks[..., 0] > 0, blocks.abs().amax(-1), torch.tensor([-1.0, torch.nan, torch.inf, 0.0]))

    register_scale_mode("refuses", refuses)
    x = torch.tensor([[-1.0, 2.0], [-1.0, 2.0], [-1.0, 2.0], [0.0, 0.0]]).reshape(1, 8)
    for text in ("mxfp4{2}(refuses)", "fp4{2}(refuses,f32)"):
        y = fake_quantize_mx(x, text)
        assert y[0, :6].isnan().all() and torch.equal(y[0, 6:], torch.zeros(2))
    register_scale_mode("of_all", lambda blocks, element: blocks.abs().amax())
    with pytest.raises(
        MXError, match=r"gives torch.float32 \(\) for blocks \(1, 4, 2\): return a float tensor \(1, 4\)"
    ):
        fake_quantize_mx(x, "mxfp4{2}(of_all)")


@pytest.mark.parametrize("name", ["floor", "nearest", "up", "bf16", "row", "e5m0", "A b", "", None])
def test_names_that_are_no_scale_mode(name):
    with pytest.raises(MXError, match="name="):
        register_scale_mode(name, of_mean)


def test_another_function_under_a_name():
    register_scale_mode("own", lambda blocks, element: blocks.amax(-1))
    with pytest.raises(MXError, match="registered with another function"):
        register_scale_mode("own", of_mean)
    of = [(lambda blocks, element, k=k: k * blocks.amax(-1)) for k in (1, 2)]
    register_scale_mode("own_k", of[0])
    with pytest.raises(MXError, match="another function"):
        register_scale_mode("own_k", of[1])
    with pytest.raises(MXError, match="must be a function"):
        register_scale_mode("own", 3)


@pytest.mark.parametrize("text", ["own_nf4{64}(bf16)", "mxown_e4m3", "mxfp4(of_mean)"])
def test_no_kernel_takes_them(text):
    register_scale_mode("of_mean", of_mean)
    spec = pt2mx.parse(text, axis=1)
    for operator, devices in select.KERNELS.items():
        assert not any(select._takes(kernel, (spec,)) for kernel in devices.values()), operator
    for use in select.USES:
        assert not select.supports(use, torch.ones(64, 64), spec, 64)


@pytest.mark.compiled_except("nvown_nf4")
@pytest.mark.parametrize("recipe", ["own_nf4{64}(bf16)", "own_e4m3", "nvown_nf4", "mxfp4(of_mean)"])
def test_flow_report_and_files(recipe, tmp_path):
    register_scale_mode("of_mean", of_mean)
    prepared, model, x = converted(recipe)
    spec = pt2mx.parse(recipe)
    sites = pt2mx.quantization_report(prepared)
    assert str(spec) in str(sites) and "2 of 2 operators quantized" in str(sites)
    program = torch.export.export(model, (x,))
    pt2mx.save_program(program, tmp_path / "net.pt2")
    assert torch.equal(pt2mx.load_program(tmp_path / "net.pt2").module()(x), model(x))
    for write in (pt2mx.make_portable, lambda program: pt2mx.export_onnx(program, tmp_path / "net.onnx")):
        with pytest.raises(MXError, match="name pt2mx's own elements and scale modes alone"):
            write(program)


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["own_nf4{64}(bf16)", "own_e4m3", "mxfp4(of_mean)"])
def test_compiled_programs_call_the_reference(recipe, compiler):
    register_scale_mode("of_mean", of_mean)
    _, model, x = converted(recipe)
    assert torch.equal(torch.compile(pt2mx.lower_to_inductor(model))(x), model(x))
    x = torch.randn(3, 70, requires_grad=True)
    results = []
    for run in (torch.compile(fake_quantize_mx, fullgraph=True), fake_quantize_mx):
        y = run(x * 1, recipe, ste="clipped")
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_operators_pass_the_checks_of_torch():
    x = torch.randn(3, 40)
    scale, data = quantize_mx(x, "own_nf4")
    torch.library.opcheck(pt2mx.ops.quantize_mx, (x, "own_nf4", 32, -1, "floor", "even"))
    torch.library.opcheck(pt2mx.ops.dequantize_mx, (data, scale, "own_nf4", 32, torch.float32, -1))


@pytest.mark.compiled
def test_another_process_registers_first(tmp_path, run_python):
    _, model, x = converted("own_nf4{64}(bf16)")
    pt2mx.save_program(torch.export.export(model, (x,)), tmp_path / "net.pt2")
    torch.save(x, tmp_path / "x.pt")
    load = f"import pt2mx, torch\nprogram = pt2mx.load_program({str(tmp_path / 'net.pt2')!r})\n"
    run = f"print(program.module()(torch.load({str(tmp_path / 'x.pt')!r})).double().sum().item())"
    assert float(run_python(REGISTER + load + run)) == pytest.approx(model(x).double().sum().item(), rel=1e-6)
    refused = "import pt2mx\ntry:\n    " + load.splitlines()[1] + "\nexcept pt2mx.MXError as error:\n    print(error)"
    message = run_python(refused)
    assert "net.pt2': unknown MX element format 'own_nf4'" in message
    assert "register one of your own before it is named" in message


def test_learned_rounding_refuses_a_codebook():
    with pytest.raises(MXError, match="own_nf4 is a codebook"):
        LatentWeight(torch.randn(4, 32), None, MXSpec("own_nf4"))


def test_algorithms_leave_weights_that_would_change_when_they_are_stored():
    register_scale_mode("of_mean", of_mean)
    model, x = torch.nn.Sequential(torch.nn.Linear(128, 64)).eval(), torch.randn(64, 128)
    exported = torch.export.export(model, (x,)).module()
    left = {}
    for recipe in ("own_nf4{64}(bf16)", "mxown_nf4", "mxfp4(of_mean)"):
        quantizer = pt2mx.MXQuantizer.from_recipe(recipe).set_algorithms("best")
        report = str(pt2mx.optimization_report(pt2mx.optimize(exported, quantizer, [(x,)])))
        left[recipe] = "would quantize rounded values to others" in report
    assert left == {"own_nf4{64}(bf16)": False, "mxown_nf4": True, "mxfp4(of_mean)": True}


def test_destinations_refuse_them_before_a_model_is_quantized():
    register_scale_mode("of_mean", of_mean)
    for recipe, names in (("own_nf4", "onnx"), ("own_e4m3", "vllm"), ("mxfp4(of_mean)", "openvino")):
        with pytest.raises(MXError, match=f"{names} does not take the recipe"):
            pt2mx.for_destinations(recipe, [names])
    weights = pt2mx.MXQuantizer().set_global(pt2mx.get_default_mx_quantization_config("mxfp4(of_mean)", None))
    assert pt2mx.for_destinations("own_nf4", ["cpu"]).changes == pt2mx.for_destinations(weights, ["onnx"]).changes == []


def test_presets_store_them_as_they_are():
    x = torch.randn(4, 40)
    for preset in PRESETS.values():
        for name in ("own_int6", "own_nf4", "own_e4m3", "int16"):
            scale, data = preset.quantize(x, name, axis=1)
            assert torch.equal(preset.dequantize(data, scale, name, axis=1), preset.fake_quantize(x, name, axis=1))


@pytest.mark.compiled
def test_kernels_that_are_imported_later_do_not_know_them(run_python):
    print_it = """
pt2mx.register_element("own_8", values=[i / 200 for i in range(200)])
from pt2mx.kernels.cpu.quantize import _DECODERS
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS
print(_DECODERS.get("own_nf4"), FRAGMENTS.get("own_8"))
"""
    assert run_python(REGISTER + print_it) == "None None\n"
