import pytest
import torch

import pt2mx
from pt2mx import MXError, MXSpec
from pt2mx.algorithms.learned_rounding import LatentWeight, within_cells

ELEMENTS = ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2", "int8", "int3", "fp3_e2m0"]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("axis", "block"), [(1, 32), (0, 5), (2, 100)])
def test_learning_starts_from_what_is_rounded(element, axis, block):
    torch.manual_seed(0)
    weight, spec = torch.randn(7, 40, 9) * 0.1, MXSpec(element, block, axis, "even")
    nearest = pt2mx.fake_quantize_mx(weight, spec)
    assert torch.equal(LatentWeight(weight, None, spec).values(), nearest)
    other = pt2mx.fake_quantize_mx(weight + 0.02 * torch.randn(7, 40, 9), spec)
    moved = LatentWeight(weight, other, spec)
    assert torch.equal(moved.values(), other)
    # latent values lie between the rounded ones and the weight
    assert ((moved.latent - other).abs() <= (weight - other).abs()).all()
    assert torch.equal((moved.latent - other).sign(), (weight - other).sign() * (moved.latent != other))


def test_latent_values_lie_inside_their_cell():
    # the cell of 2 in FP4 reaches from 1.75 to 2.5: to .8 of the way there, or to the weight
    weight, rounded = torch.tensor([6.0, 1.0, 5.0, 2.2]), torch.tensor([6.0, 2.0, 2.0, 2.0])
    latent = LatentWeight(weight, rounded, MXSpec("mxfp4")).latent
    torch.testing.assert_close(latent, torch.tensor([6.0, 1.8, 2.4, 2.16]), rtol=0, atol=1e-3)


def test_steps_are_in_distances_of_neighbours():
    values = torch.tensor([6.0, -4.0, 2.0, 1.5, 0.5, 0.0])
    weight = LatentWeight(values, values, MXSpec("mxfp4"))
    weight.descend(torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, 0.0]), 0.75)
    assert torch.equal(weight.latent, torch.tensor([4.5, -5.5, 2.75, 1.125, 0.875, 0.0]))
    assert torch.equal(weight.values(), torch.tensor([4.0, -6.0, 3.0, 1.0, 1.0, 0.0]))


def test_scales_stay():
    values = torch.tensor([6.0, 1.0, 0.25, 0.25])
    weight = LatentWeight(values, None, MXSpec("mxfp4", 2))
    weight.descend(torch.tensor([1.0, 1.0, -1.0, -1.0]), 4.0)  # 6 - 4 * 2, 1 - 4 / 2; the other block: 6 / 16 a step
    assert torch.equal(weight.values(), torch.tensor([-2.0, -1.0, 0.375, 0.375]))
    weight.descend(torch.tensor([-1.0, -1.0, 0.0, 0.0]), 100.0)
    assert torch.equal(weight.values()[:2], torch.tensor([6.0, 6.0]))  # the largest


def test_descent_finds_the_better_rounding():
    """Two equal columns: one of them should round up."""
    weight, x = torch.tensor([[0.3, 0.28]]), torch.ones(1, 2)
    learned = LatentWeight(weight, None, MXSpec("int3", 2))

    def error(values):
        return (x @ (values - weight).T).square().sum()

    assert torch.equal(learned.values(), torch.tensor([[0.25, 0.25]]))
    errors = []
    for step in range(20):
        values = learned.values().requires_grad_()
        learned.descend(torch.autograd.grad(error(values), values)[0], (1 - step / 20) / 20)
        errors.append((error(values).item(), values.tolist()))
    assert min(errors)[1] == [[0.375, 0.25]]


def test_within_cells_of_whole_numbers():
    weight, rounded = torch.tensor([0.2, 0.9, -3.0]), torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(
        within_cells(weight, rounded, torch.round), torch.tensor([0.2, 0.5, 0.5]), rtol=0, atol=2e-3
    )


def test_a_block_of_zeros_and_large_and_small_values():
    for factor in (0.0, 1e-30, 1e30):
        weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * factor
        learned = LatentWeight(weight, None, MXSpec("mxfp4", 32, 1))
        assert torch.equal(learned.values(), pt2mx.fake_quantize_mx(weight, MXSpec("mxfp4", 32, 1)))


@pytest.mark.parametrize(
    ("rounded", "spec", "message"),
    [
        (torch.zeros(2, 2), MXSpec("mxfp4"), r"the weight is \(2, 3\), and rounded \(2, 2\)"),
        (torch.full((2, 3), 0.7), MXSpec("mxfp4"), r"holds values that mxfp4_e2m1\{32\} does not: quantize it first"),
        (None, MXSpec("mxfp4", rounding="stochastic"), "without stochastic rounding"),
    ],
)
def test_bad_input(rounded, spec, message):
    with pytest.raises(MXError, match=message):
        LatentWeight(torch.zeros(2, 3), rounded, spec)
