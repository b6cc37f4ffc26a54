"""Inputs that users bring by accident: each ends in a right answer or in an `MXError`."""

import math

import pytest
import torch

from pt2mx import (
    MXError,
    MXSpec,
    MXTensor,
    compare_mx_formats,
    dequantize_mx,
    fake_quantize_mx,
    mx_statistics,
    ops,
    parse,
    quantize_linear_,
    quantize_mx,
)
from pt2mx.compat import PRESETS
from tests.cpu_kernels import environment


def packed(name="mxfp4"):
    scale, data = quantize_mx(torch.randn(4, 64), name)
    return data, scale


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, s: dequantize_mx(d, s.to("meta"), "mxfp4"), "data is on cpu and scale on meta"),
        (lambda d, s: dequantize_mx(d.to("meta"), s, "mxfp4"), "data is on meta and scale on cpu"),
        (lambda d, s: MXTensor(d, s.to("meta"), "mxfp4"), "data is on cpu and scale on meta"),
        (lambda d, s: dequantize_mx(d[0, 0], s[0], "mxfp4"), "at least one dimension"),
        (lambda d, s: dequantize_mx(d, s, "mxfp4", length=64.0), "length=64.0 must be an integer"),
        (lambda d, s: dequantize_mx(d, s, "mxfp4", length=True), "length=True must be an integer"),
        (lambda d, s: dequantize_mx(d, s, "mxfp4", length=2**70), "must be an integer"),
        (lambda d, s: dequantize_mx(d[:, :0], s[:, :0], "mxfp4", length=-1), "length=-1 must be"),
        (lambda d, s: MXTensor(None, s, "mxfp4"), "qdata must be a torch.Tensor, not NoneType"),
    ],
)
def test_parts_that_do_not_belong_together(call, message):
    with pytest.raises(MXError, match=message):
        call(*packed())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fake_quantize_mx(x, "mxfp4", ste=3), "unknown ste 3"),
        (lambda x: fake_quantize_mx(x, "mxfp4", ste=["clipped"]), "unknown ste"),
        (lambda x: quantize_mx(x.to_sparse(), "mxfp4"), "x must be a dense tensor"),
        (lambda x: quantize_mx(x.to_sparse_csr(), "mxfp4"), "x must be a dense tensor"),
        (lambda x: fake_quantize_mx(torch.nested.nested_tensor([x, x[:2]]), "mxfp4"), "x must be a dense tensor"),
        (lambda x: quantize_mx(x, ([], 1)), "unknown MX element format"),
        (lambda x: parse("mxfp4{" + "9" * 5000 + "}"), "unknown MX format"),
        (lambda x: parse("mxfp4{٣٢}"), "unknown MX format"),
        (lambda x: parse("mxfp4{32}(,,)"), "unknown MX format"),
        (lambda x: parse("int8_fullfn"), "unknown MX element format"),
        (lambda x: parse("float8_e4m3fnu"), "unknown MX element format"),
        (lambda x: MXSpec("mxfp4", scale_mode=x), "unknown scale_mode"),
        (lambda x: compare_mx_formats(x, 5), "formats=5"),
        (lambda x: mx_statistics(x.to("meta"), "mxfp4"), "has no values"),
        (lambda x: PRESETS["pychop"].fake_quantize(None, "mxfp4"), "x must be a torch.Tensor"),
        (lambda x: quantize_linear_(None, None), "model must be a Module"),
        (lambda x: ops.clip_gradient_mx(torch.ones(3), x, "fp4_e2m1", 32, -1, "floor", "even"), "is no gradient of x"),
        (
            lambda x: ops.clip_gradient_mx(
                torch.ones(4, 64, dtype=torch.int32), x, "fp4_e2m1", 32, -1, "floor", "even"
            ),
            "is no gradient",
        ),
        (lambda x: ops.random_bits(torch.ones(3, dtype=torch.int64), [4]), "the seed tensor"),
        (lambda x: ops.random_bits(torch.tensor(1.0), [4]), "the seed tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors):UserWarning")
def test_bad_arguments(call, message):
    with pytest.raises(MXError, match=message):
        call(torch.randn(4, 64))


def test_second_derivatives_pass_through_the_clipped_estimator():
    x = torch.randn(4, 64, requires_grad=True)
    y = fake_quantize_mx(x, "mxfp4", ste="clipped")
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    passed = ops.clip_gradient_mx(torch.ones(4, 64), x.detach(), "fp4_e2m1", 32, -1, "floor", "even")
    assert torch.equal(second, 6 * y.detach() * passed) and not passed.all()


def test_sqnr_where_values_dequantize_to_inf():
    statistics = mx_statistics(torch.full((32,), 3.4e38), "mxfp4(ceil)")
    assert statistics.sqnr == -math.inf and statistics.max_abs_error == math.inf


@pytest.mark.parametrize("name", ["torchao", "torchmx", "microxcaling"])
@pytest.mark.parametrize("shape", [(2, 33), (2, 30), (3, 1), (0, 33), (2, 0)])
@pytest.mark.parametrize("element", ["mxfp6_e3m2", "mxfp8", "mxint8", "int4", "int6"])
def test_presets_store_odd_lengths(name, shape, element):
    preset, x = PRESETS[name], torch.randn(shape)
    scale, data = preset.quantize(x, element, block_size=5)
    back = preset.dequantize(data, scale, element, block_size=5, length=shape[1])
    assert torch.equal(back, preset.fake_quantize(x, element, block_size=5))
    if name != "microxcaling" and parse(element).element.bits == 6:  # a code a byte: the length is in the shape
        assert data.shape == x.shape
        assert torch.equal(preset.dequantize(data, scale, element, block_size=5), back)


@pytest.mark.parametrize("shape", [(), (3, 0), (0, 4), (5,)])
def test_flushing_presets_take_every_shape(shape):
    x = torch.randn(shape)
    assert PRESETS["microxcaling_flush"].fake_quantize(x, "mxfp8").shape == x.shape


def test_a_weight_of_codes_moves_to_shared_memory():
    layer = torch.nn.Linear(70, 8)
    layer.weight = torch.nn.Parameter(MXTensor.to_mx(layer.weight.detach(), "mxfp4"), requires_grad=False)
    want = layer(torch.ones(1, 70))
    layer.share_memory()
    assert layer.weight.qdata.is_shared() and torch.equal(layer(torch.ones(1, 70)), want)


def test_statistics_of_a_tensor_of_codes():
    statistics = MXTensor.to_mx(torch.randn(4, 64), "mxfp4").statistics()
    assert statistics["bits_per_element"] == 4.25 and statistics["num_blocks"] == 8
    assert statistics["compression_ratio_fp16"] == 16 / 4.25


@pytest.mark.slow
def test_a_damaged_library_is_built_again(run_python, tmp_path):
    code = "import torch, pt2mx; print(pt2mx.fake_quantize_mx(torch.ones(32), 'mxfp4').sum().item())"
    run_python(code, env=environment(tmp_path))
    (library,) = tmp_path.rglob("*.so")
    library.write_bytes(b"")
    assert run_python(code, env=environment(tmp_path)).split() == ["32.0"]
    assert library.stat().st_size > 1000
