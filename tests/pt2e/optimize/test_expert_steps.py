"""Experts that train through fake quantization: their gradients, and those that see no token."""

import itertools

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, distill
from pt2mx.pt2e.optimize.expert_steps import initial_state, step_experts
from pt2mx.pt2e.optimize.losses import relative_error
from tests.mixtures import CHOSEN, EXPERTS, Mixture, batches, mixtures
from tests.rank_processes import run_ranks
from tests.training_models import InterruptedLoss

QUANTIZER = MXQuantizer.from_recipe("mxfp4_weights_mxfp8_activations")
BOTH = [torch.float32, torch.bfloat16]
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}


def prepared_of(model, x):
    exported = torch.export.export(model, (x,)).module()
    return exported, pt2mx.prepare_qat_pt2e(exported, QUANTIZER)


def a(x):
    return pt2mx.fake_quantize_mx(x, "mxfp8")


def w(x):
    return pt2mx.fake_quantize_mx(x, pt2mx.MXSpec("mxfp4", scale_mode="even", axis=-2))


def by_loop(model, x):
    """The quantized layer of experts, one expert after the other; the router is in float."""
    scores, ids = model.router(x).topk(CHOSEN)
    result = torch.zeros_like(x)
    for expert in range(EXPERTS):
        row, place = (ids == expert).nonzero().T
        h = a(x[row]) @ w(model.up)[expert] + model.up_bias[expert]
        y = a(nn.functional.silu(h)) @ w(model.down)[expert] + model.down_bias[expert]
        result = result.index_add(0, row, y * scores.softmax(-1)[row, place, None])
    return result


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_gradients_are_those_of_a_loop_over_experts(dtype, rtol):
    torch.manual_seed(0)
    model, x = Mixture().to(dtype), torch.randn(24, 32).to(dtype)
    with torch.no_grad():
        model.router.bias[1] = -1e4  # no token
    _, prepared = prepared_of(model, x)
    direction = torch.randn(24, 32).to(dtype)
    for function in (prepared, lambda x: by_loop(model, x)):
        (function(x) * direction).sum().backward()
    for name, parameter in model.named_parameters():
        actual, wanted = prepared.get_parameter(name).grad.float(), parameter.grad.float()
        assert wanted.count_nonzero() > 0
        torch.testing.assert_close(actual, wanted, rtol=0, atol=rtol * wanted.abs().max().item(), msg=name)
        if name not in ("router.weight", "router.bias"):
            assert actual[1].count_nonzero() == 0


def test_steps_are_those_of_adam_for_each_expert_by_itself():
    torch.manual_seed(0)
    parameter = torch.randn(3, 4, 5)
    state, start = initial_state(parameter), parameter.clone()
    each = [nn.Parameter(expert.clone()) for expert in parameter]
    optimizer = torch.optim.Adam(each, lr=0.1)
    for seen in ([0, 2], [0], [], [2], [0, 2]):
        gradient = torch.zeros(3, 4, 5)
        gradient[seen] = torch.randn(len(seen), 4, 5)
        before = parameter.clone()
        step_experts(parameter, gradient, state, 0.1, **ADAM)
        for i, expert in enumerate(each):
            expert.grad = gradient[i] if i in seen else None
            assert i in seen or torch.equal(parameter[i], before[i])
        optimizer.step()
    assert torch.equal(parameter[1], start[1]) and state["step"].tolist() == [3, 0, 3]
    torch.testing.assert_close(parameter, torch.stack([expert.detach() for expert in each]))


def test_signed_zeros_of_an_expert_stay_and_one_with_a_gradient_of_nan_does_not():
    parameter = torch.tensor([[0.0, -0.0], [1.0, 2.0]])
    step_experts(parameter, torch.tensor([[0.0, -0.0], [1.0, torch.nan]]), initial_state(parameter), 0.1, **ADAM)
    assert parameter[0].signbit().tolist() == [False, True]
    assert parameter[1].isnan().tolist() == [False, True]


def test_parameters_of_one_value_an_expert():
    parameter = torch.ones(3)
    step_experts(parameter, torch.tensor([1.0, 0.0, -2.0]), initial_state(parameter), 0.5, **ADAM)
    torch.testing.assert_close(parameter, torch.tensor([0.5, 1.0, 1.5]))


@pytest.mark.compiled_except("False-dtype0", "True-dtype1")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("recompute", [False, True])
def test_an_expert_moves_in_the_steps_alone_that_bring_it_tokens(dtype, recompute):
    """Another expert moves in every step."""
    inputs = batches(dtype)
    exported, prepared = prepared_of(mixtures(dtype), inputs[0])
    values = {name: [] for name, _ in prepared.named_parameters() if name.startswith("layers.0")}

    def loss(actual, expected):
        for name, steps in values.items():
            steps.append(prepared.get_parameter(name).detach().clone())
        return relative_error(actual, expected)

    # steps that bfloat16 shows
    distill(prepared, exported, inputs, loss, epochs=2, lr=1e-2, decay="constant", recompute=recompute)
    assert len(values) == 6
    for name, steps in values.items():
        first, *_, last = zip(*steps, strict=True)
        assert moves(first) > 10, name
        assert moves(last) == 2 or "router" in name, name  # the batch comes once an epoch


def moves(steps):
    return sum(not torch.equal(before, after) for before, after in itertools.pairwise(steps))


def trained(dtype=torch.float32, stop=None, **options):
    """The values after a training, and of the float program; None after one that was stopped at a call of the loss."""
    inputs = batches(dtype)
    exported, prepared = prepared_of(mixtures(dtype), inputs[0])
    loss = InterruptedLoss(relative_error, stop)
    try:
        distill(prepared, exported, inputs, loss, epochs=2, lr=1e-3, evaluations=1, **options)
    except KeyboardInterrupt:
        return None
    return {name: tensor.detach().clone() for name, tensor in prepared.state_dict().items()}


@pytest.mark.compiled_except("dtype1")
@pytest.mark.parametrize("dtype", BOTH)
def test_it_goes_on_with_the_same_steps(tmp_path, dtype):
    wanted = trained(dtype)
    assert trained(dtype, stop=14, checkpoint=tmp_path) is None
    assert any(tmp_path.iterdir())
    actual = trained(dtype, checkpoint=tmp_path)
    assert all(torch.equal(actual[name], tensor) for name, tensor in wanted.items())


def train_on_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    results = [trained(group=group, recompute=True), trained(torch.bfloat16, group=group)]
    trained(group=group, recompute=True, stop=8, checkpoint=f"{folder}/stopped")
    results.append(trained(group=group, recompute=True, checkpoint=f"{folder}/stopped"))
    trained(group=group, stop=8, checkpoint=f"{folder}/half")
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.compiled
def test_ranks_take_the_steps_of_one_process(tmp_path):
    run_ranks(train_on_rank, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    whole, half, resumed = first
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    wanted = trained(accumulate=2), trained(torch.bfloat16, accumulate=2)
    for name, tensor in wanted[0].items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
        torch.testing.assert_close(half[name].float(), wanted[1][name].float(), rtol=0.02, atol=5e-3, msg=name)
    # one process goes on where two have stopped
    alone = trained(accumulate=2, checkpoint=tmp_path / "half")
    for name, tensor in whole.items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_compiled_steps():
    compiled = trained(compile=True)
    for name, tensor in trained().items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
