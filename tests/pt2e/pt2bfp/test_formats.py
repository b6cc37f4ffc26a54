import pytest
import torch

from pt2mx import MXError, fake_quantize_mx
from pt2mx.pt2e import pt2bfp
from tests.compare import same

torch.manual_seed(0)
X = torch.randn(6, 200)


def spec(format, axis=-1, **changes):
    return pt2bfp.Format.from_shorthand(format).replace(axis=axis, **changes)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    ("round", "rounding"), [("N", "even"), ("nearest", "even"), ("U", "up"), ("down", "down"), ("D", "down")]
)
def test_quantize_bfp_is_the_quantize_kernel(axis, round, rounding):
    y = pt2bfp._quantize_bfp(X, 16, pt2bfp.DEFAULT_FORMAT, axes=[axis], block_size=32, round=round)
    assert same(y, fake_quantize_mx(X, spec("BFP[8|8]{32}(SN)", axis, rounding=rounding)))


def test_quantize_bfp_of_other_formats():
    assert pt2bfp._quantize_bfp(X, 8, None) is X
    whole = pt2bfp._quantize_bfp(X, 8, "BFP[4|8]{64}(SN)", axes=-1, block_size=0, round="N")
    assert same(whole, fake_quantize_mx(X, spec("BFP[4|8]{200}(SN)")))
    asymmetric = pt2bfp._quantize_bfp(X, 8, "BFP[4|8]{64}(SN)", axes=-1, block_size=64, round="N", symmetric=False)
    assert same(asymmetric, fake_quantize_mx(X, spec("BFP[4|8]{64}(_N)")))
    assert not same(asymmetric, pt2bfp._quantize_bfp(X, 8, "BFP[4|8]{64}(SN)", axes=-1, block_size=64, round="N"))
    narrow = pt2bfp._quantize_bfp(X * 1e6, 4, "MXFP8[E4M3]{32}", axes=1, block_size=32, round="N")
    assert same(narrow, fake_quantize_mx(X * 1e6, spec("MXFP8[E4M3]{32}", scale_exp_bits=4)))


def test_quantize_bfp_rounds_at_random_by_default():
    torch.manual_seed(0)
    first, second = (pt2bfp._quantize_bfp(X, 8, "BFP[4|8]{64}(SN)", axes=-1, block_size=64) for _ in range(2))
    assert not torch.equal(first, second)


def test_numbers_of_a_format():
    assert pt2bfp._get_format_params("MXFP8[E4M3]{64}") == (4, 5, 8, 448.0, 2.0**-6)
    assert pt2bfp._get_format_params("MXFP8[E5M2]{64}") == (5, 4, 15, 57344.0, 2.0**-14)
    assert pt2bfp._get_format_params("BFP[8|8]{64}(SN)") == (0, 8, 0, 127 / 64, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": None}, "axes=None must be one axis"),
        ({"axes": [0, 1]}, "must be one axis"),
        ({"axes": 1.5}, "axes=1.5 must be one axis"),
        ({"axes": [2], "block_size": 0}, r"axes=\[2\] must be one axis of A"),
        ({"A": [1.0]}, "A must be a torch.Tensor, not list"),
        ({"round": ["N"]}, r"unknown rounding \['N'\]"),
        ({"round": "floor"}, "unknown rounding 'floor'"),
        ({"scale_bits": 0}, "scale_bits=0 must be an integer of at least 1"),
        ({"scale_bits": True}, "scale_bits=True must be an integer of at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MXError, match=message):
        pt2bfp._quantize_bfp(**{"A": X, "scale_bits": 8, "elem_format": "BFP[8|8]{64}(SN)", "axes": [-1]} | arguments)
