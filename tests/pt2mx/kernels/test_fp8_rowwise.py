"""FP8 rows represent quantized values exactly, and their matmuls equal matmuls of the values."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import ELEMENTS, MXSpec, dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.kernels import fp8_rowwise
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS, E4M3, ROOMS
from pt2mx.kernels.packing import pack
from pt2mx.ops.fp8_rowwise import LayerNormFP8Rows

MODES = ("floor", "ceil", "rceil", "even", "mse")


def blocks_of_many_scales(rows=64, k=256, span=6):
    """(rows, k) whose blocks' scales lie up to 2**span apart."""
    powers = torch.randint(-span // 2, span // 2 + 1, (rows, k // BLOCK))
    return torch.randn(rows, k) * torch.exp2(powers.float()).repeat_interleave(BLOCK, 1)


def values(codes, scale, rest):
    return torch.where(scale < 0, rest.float(), codes.view(E4M3).float() * scale)


def test_the_room_of_each_element():
    assert {name: tuple(room) for name, room in ROOMS.items()} == {
        "fp4_e2m1": (6, 14), "fp6_e2m3": (5, 11), "fp6_e3m2": (4, 9),
    }  # fmt: skip


@pytest.mark.parametrize("name", ROOMS)
def test_every_code_at_every_distance_that_fits(name):
    element, room = ELEMENTS[name], ROOMS[name]
    positive = dequantize_mx(*_all_codes(element), name, BLOCK)[0]
    for below in range(room.spread + 1):
        row = torch.cat((torch.full((BLOCK,), element.max_normal), positive * 2.0**-below)).view(1, -1)
        data = quantize_mx(torch.full_like(row, element.max_normal), name, BLOCK)[1]
        data[:, data.shape[1] // 2 :] = _all_codes(element)[0]
        scale = torch.tensor([[140, 140 - below]], dtype=torch.uint8)
        codes, row_scale = fp8_rowwise.of_packed(data, scale, element, row.shape[1])
        assert row_scale.item() > 0
        assert torch.equal(codes.view(E4M3).float() * row_scale, dequantize_mx(data, scale, name, BLOCK))
    scale = torch.tensor([[140, 140 - room.spread - 1]], dtype=torch.uint8)
    assert fp8_rowwise.of_packed(data, scale, element, row.shape[1])[1].item() == -1


def _all_codes(element):
    """(1, bytes) of 32 codes, all of an element of 4 bits twice, every second of one of 6 bits, and their scale, 1."""
    codes = torch.arange(BLOCK) * 2 ** (element.bits - 5) if element.bits > 4 else torch.arange(BLOCK) % 16
    data = pack(codes.to(torch.int32).view(1, -1), 1, element.bits)
    return data, torch.tensor([[127]], dtype=torch.uint8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ROOMS)
def test_rows_hold_the_quantized_values(name, mode):
    x = blocks_of_many_scales().bfloat16()
    x[3, 5], x[4, 6], x[5], x[6, :BLOCK] = torch.nan, torch.inf, 0, 0
    x[7] *= 2.0**-120
    x[8] *= 2.0**100
    x[9, :BLOCK] *= 2.0**-40
    spec = MXSpec(name, BLOCK, axis=1, scale_mode=mode)
    codes, scale, rest = fp8_rowwise.quantize(x, spec, "none")
    want = fake_quantize_mx(x, spec).float()
    torch.testing.assert_close(values(codes, scale, rest), want, rtol=0, atol=0, equal_nan=True)
    assert (scale < 0).flatten()[[3, 4, 9]].all() and not (scale < 0).flatten()[[5, 6, 7, 8]].any()


def test_every_scale_of_a_row():
    element = ELEMENTS["fp4_e2m1"]
    data, scale = _all_codes(element)[0].expand(254, -1), torch.arange(1, 255, dtype=torch.uint8).view(-1, 1)
    codes, row_scale = fp8_rowwise.of_packed(data, scale, element, BLOCK)
    assert (row_scale > 0).all()
    assert torch.equal(codes.view(E4M3).float() * row_scale, dequantize_mx(data, scale, "fp4_e2m1", BLOCK))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    x, spec = torch.randn(8, 64).bfloat16(), MXSpec("fp6_e2m3", BLOCK, axis=1)
    torch_names = {"gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "none": lambda v: v}
    want = torch_names.get(activation, getattr(F, activation, None))(x)
    assert torch.equal(values(*fp8_rowwise.quantize(x, spec, activation)), fake_quantize_mx(want, spec).float())


@pytest.mark.parametrize("residual", [False, True])
def test_layer_norm(residual):
    x, spec = torch.randn(8, 3, 64).bfloat16(), MXSpec("fp4_e2m1", BLOCK, axis=2)
    added, weight, bias = torch.randn_like(x) if residual else None, torch.randn(64), torch.randn(64)
    weight, bias = weight.bfloat16(), bias.bfloat16()
    normed, *rows = LayerNormFP8Rows(x, added, weight, bias, 1e-5, spec).define(spec)
    assert torch.equal(normed, F.layer_norm(x + added if residual else x, (64,), weight, bias, 1e-5))
    assert torch.equal(values(*rows), fake_quantize_mx(normed, spec).float())


@pytest.mark.parametrize("x_name", ROOMS)
@pytest.mark.parametrize("name", ROOMS)
def test_the_product(x_name, name):
    x, w, bias = blocks_of_many_scales(), blocks_of_many_scales(48, span=2), torch.randn(48)
    x[5, :BLOCK] *= 2.0**-40
    x[6, 7] = torch.nan
    weight, scale, _ = fp8_rowwise.quantize(w, MXSpec(name, BLOCK, axis=1), "none")
    rows = fp8_rowwise.quantize(x, MXSpec(x_name, BLOCK, axis=1), "none")
    got = fp8_rowwise.mm(*rows, weight, scale, bias)
    x, w = fake_quantize_mx(x, x_name, BLOCK).double(), fake_quantize_mx(w, name, BLOCK).double()
    assert got[6].isnan().all()
    torch.testing.assert_close(got.double(), x @ w.T + bias, rtol=1e-4, atol=1e-3, equal_nan=True)
