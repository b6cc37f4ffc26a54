"""Promises of presets beyond the recorded values of test_golden."""

import pytest
import torch

import pt2mx
from pt2mx import MXError, MXSpec, fake_quantize_mx, quantize_mx
from pt2mx.compat import PRESETS, Preset


def test_specs():
    assert PRESETS["microxcaling"].spec("mxfp4") == MXSpec("fp4_e2m1", rounding="half_away")
    assert PRESETS["quark"].spec("mxint8") == MXSpec("int8_full", 32, 1, rounding="half_away")
    assert PRESETS["quark"].spec("mxint8", rounding="even") == MXSpec("int8_full", 32, 1)
    assert PRESETS["quark"].spec("mxfp6") == MXSpec("fp6_e2m3", 32, 1)
    assert PRESETS["modelopt"].spec("mxfp4") == MXSpec("fp4_e2m1", scale_mode="rceil", rounding="half_toward_zero")
    assert PRESETS["modelopt"].spec("mxfp8") == MXSpec("fp8_e4m3", scale_mode="rceil")
    assert PRESETS["torchao"].spec("mxfp8") == PRESETS["torchmx"].spec("mxfp8") == MXSpec("fp8_e4m3")


@pytest.mark.parametrize("name", PRESETS)
def test_a_spelling_keeps_its_blocks_and_modes(name):
    preset, x = PRESETS[name], torch.randn(6, 40)
    spec = preset.spec("mxfp8{16,-2}(rceil,down)")
    assert spec == MXSpec("fp8_e4m3", 16, -2, "rceil", "down") == preset.spec(spec)
    assert torch.equal(preset.fake_quantize(x, spec), fake_quantize_mx(x, spec))
    assert preset.spec(spec, block_size=8, rounding="up") == spec.replace(block_size=8, rounding="up")


def test_every_row_says_why_and_what_it_leaves_out():
    default = Preset("", "", "", "")
    for preset in PRESETS.values():
        assert preset.version and preset.reason and preset.not_copied
        changed = [f for f in vars(default) if getattr(preset, f) != getattr(default, f)]
        assert len(changed) > 4, preset.name  # more than its four texts


def test_torchmx_bytes():
    """High nibble first; int8 codes as whole numbers."""
    x = torch.tensor([[1.0, -6.0, 0.5, 0.0]])
    scale, data = quantize_mx(x, "mxfp4", 4)
    assert data.tolist() == [[0xF2, 0x01]]
    assert PRESETS["torchmx"].quantize(x, "mxfp4", block_size=4)[1].tolist() == [[0x2F, 0x10]]
    scale, data = PRESETS["torchmx"].quantize(x, "mxint8", block_size=4)
    assert (data.to(torch.int8) * 2.0 ** (scale.float() - 127)).tolist() == x.tolist()


@pytest.mark.parametrize("element", ["mxfp4", "mxfp6_e3m2", "mxfp8", "mxint8"])
@pytest.mark.parametrize("name", PRESETS)
def test_storage_round_trip(name, element):
    x = torch.randn(3, 64, 2)
    x[0, 0, 0] = torch.inf
    preset = PRESETS[name]
    axis = 1 if preset.axis is not None else 0
    x = x if preset.axis is not None else x.flatten()
    fields = {"axis": axis}
    scale, data = preset.quantize(x, element, **fields)
    back = preset.dequantize(data, scale, element, length=x.shape[axis], **fields)
    want = preset.fake_quantize(x, element, **fields)
    assert torch.equal(back.nan_to_num(9), want.nan_to_num(9)) and want.isnan().any()


def test_blocks_over_all_values_in_order():
    x = torch.randn(5, 7, 3)
    got = PRESETS["pychop"].fake_quantize(x, "mxfp8")
    assert torch.equal(got, fake_quantize_mx(x.flatten(), "mxfp8").reshape(x.shape))


def test_subnormal_blocks_are_flushed():
    x = torch.tensor([1e-39] * 32 + [1e-37] + [1e-39] * 7)
    flushed, kept = (PRESETS[n].fake_quantize(x, "mxfp8") for n in ("microxcaling_flush", "microxcaling"))
    assert not flushed[:32].any() and kept[:32].all()
    assert torch.equal(flushed[32:], kept[32:])


def test_a_nan_is_no_subnormal():
    x = torch.cat([torch.full((32,), torch.nan), torch.full((32,), 1e-39)])
    y = PRESETS["microxcaling_flush"].fake_quantize(x, "mxfp8")
    assert y[:32].isnan().all() and not y[32:].any()


@pytest.mark.parametrize("element", ["mxfp4", "mxfp8", "mxint8"])
@pytest.mark.parametrize("bits", [3, 5, 7, 8, 11])
def test_a_block_above_a_narrow_scale_is_nan_as_in_microxcaling(element, bits):
    """The largest exponent of the scale is 2**(bits - 1) - 1; pt2mx itself saturates."""
    emax = pt2mx.parse(element).element.emax
    top = 2 ** (bits - 1) + emax  # of amax
    exponents = [e for e in (top - 2, top - 1, top, top + 1) if e < 128]
    x = torch.tensor([[2.0**e * 1.9, -(2.0**e)] for e in exponents]) if exponents else torch.tensor([[3e38, -1.0]])
    got = PRESETS["microxcaling"].fake_quantize(x, element, scale_exp_bits=bits)
    spec = PRESETS["microxcaling"].spec(element, scale_exp_bits=bits)
    beyond = torch.tensor([[e >= top] for e in exponents] or [[False]])
    want = fake_quantize_mx(x, spec).masked_fill(beyond, torch.nan)
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and fake_quantize_mx(x, spec).isfinite().all()
    assert bool(got.isnan().any()) == (bits < 8)


def test_rounding_modes_by_number():
    ties = torch.tensor([[1.0, 1 / 128, 3 / 128, -1 / 128, -3 / 128]])  # of 2**-6, the quantum of int8
    for number, quanta in enumerate([[1, 2, -1, -2], [1, 2, 0, -1], [0, 2, 0, -2]]):
        got = PRESETS["quark"].fake_quantize(ties, "mxint8", rounding_mode=number)
        assert got[0, 1:].mul(64).tolist() == quanta
        assert PRESETS["quark"].spec("mxfp8", number).rounding == "even"
    for number in (3, -1, "even", True, 1.0):
        with pytest.raises(MXError, match=r"quark has no rounding_mode .*: allowed: 0 \(half_away\), 1 \(half_up\), 2"):
            PRESETS["quark"].spec("mxint8", number)
    with pytest.raises(MXError, match="torchao has no rounding_mode 0: allowed: none"):
        PRESETS["torchao"].spec("mxint8", rounding_mode=0)


def test_what_a_scale_byte_cannot_say_is_refused():
    with pytest.raises(MXError, match=r"below what torchmx stores for int8 \(-121\)"):
        PRESETS["torchmx"].quantize(torch.full((32,), 1e-38), "mxint8")
    scale, _ = PRESETS["torchmx"].quantize(torch.zeros(32), "mxint8")
    assert scale.tolist() == [0]
