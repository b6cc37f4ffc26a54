import pytest
import torch

from pt2mx import FORMATS, MXError, MXSpec, fake_quantize_mx, parse
from pt2mx.algorithms import block_exponents, gptq, round_to_blocks


@pytest.mark.parametrize("mode", ["floor", "even", "rceil", "ceil", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_to_the_scales_of_a_mode_is_its_quantization(name, mode):
    weight = torch.randn(5, 70) * torch.logspace(-3, 3, 70)
    spec = MXSpec(name, 32, 1, mode)
    rounded = round_to_blocks(weight, block_exponents(weight, spec), spec)
    assert torch.equal(rounded, fake_quantize_mx(weight, spec))


def test_blocks_end_with_their_line():
    weight = torch.randn(3, 4 * 40)
    spec = MXSpec("mxfp4", 32)
    exponents = block_exponents(weight, spec, line=40)
    assert exponents.shape == (3, 4 * 2)
    by_line = torch.cat([fake_quantize_mx(part, spec) for part in weight.split(40, 1)], 1)
    assert torch.equal(round_to_blocks(weight, exponents, spec, line=40), by_line)


def test_important_columns_decide_the_scale():
    # with the scale 2 the first value is exact and the others are lost, with 1 the first saturates
    weight = torch.tensor([[7.9, 0.5, 0.5, 0.5]])
    spec = MXSpec("mxfp4", 4)
    assert block_exponents(weight, spec).tolist() == [[0]]
    assert block_exponents(weight, spec, importance=torch.tensor([1.0, 0, 0, 0])).tolist() == [[1]]
    assert block_exponents(weight, spec, importance=torch.tensor([0.0, 1, 1, 1])).tolist() == [[0]]


def test_weighted_scales_never_lose_more_than_those_of_the_mode():
    weight, importance = torch.randn(16, 256), torch.rand(256) ** 4
    spec = MXSpec("mxfp4", 32)

    def error(exponents):
        return ((round_to_blocks(weight, exponents, spec) - weight).square() * importance).sum()

    assert error(block_exponents(weight, spec, importance=importance)) < error(block_exponents(weight, spec))


def test_lines_that_do_not_divide():
    with pytest.raises(MXError, match="lines of 30 columns do not divide a weight of 64"):
        block_exponents(torch.ones(2, 64), MXSpec("mxfp4"), line=30)


def test_shapes_that_do_not_belong_together():
    with pytest.raises(MXError, match=r"the importance of 64 columns has the shape \(2,\)"):
        block_exponents(torch.ones(2, 64), MXSpec("mxfp4"), importance=torch.ones(2))
    with pytest.raises(MXError, match="must be a matrix"):
        block_exponents(torch.ones(64), MXSpec("mxfp4"))


@pytest.mark.parametrize("mode", ["nearest", "rceil", "mse"])
def test_scales_with_a_significand_have_no_exponents(mode):
    spec = parse("mxfp4", scale_format="e4m3", scale_mode=mode)
    with pytest.raises(MXError, match="scales with a significand"):
        block_exponents(torch.ones(2, 64), spec)
    with pytest.raises(MXError, match="scales with a significand"):
        gptq(torch.ones(2, 64), torch.eye(64), spec)
