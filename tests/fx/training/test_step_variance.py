"""A training pass does not depend on the statistics that it writes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.training.fuse_batch_norm import StepVariance
from tests.compare import relative_error
from tests.flow import exported

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp6{8}", "mxfp8{8}"))

#: ways to call a pass: directly, and under torch's two kinds of checkpointing
CALLS = {
    "directly": lambda model, x: model(x),
    "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "checkpointed, reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
}


def network():
    """Convolutions with each kind of padding, and a batch norm that follows no layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding="same", groups=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.BatchNorm2d(4),
    ).train()


def data(seed=1):
    return torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def prepared(layers=None):
    return pt2mx.prepare_qat_pt2e(exported(network()[:layers], data()), QUANTIZER)


def steps(model, call, passes=1, count=3):
    """Return the gradients of each step, with that many passes over other batches, and the last state."""
    optimizer, gradients = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(count):
        optimizer.zero_grad()
        losses = [call(data(10 * step + i).requires_grad_()).square().mean() for i in range(passes)]
        torch.stack(losses).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.diagonal
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
def test_checkpointing_changes_no_gradient_and_no_statistic(name, passes):
    results = []
    for call in (CALLS["directly"], CALLS[name]):
        model = prepared()
        pt2mx.enable_observer(model)
        results.append(steps(model, lambda x, model=model, call=call: call(model, x), passes))
    (want_gradients, want), (got_gradients, got) = results
    # the gradients of two passes are added in another order
    tolerance = 0 if passes == 1 else 1e-6
    for step, want_step in zip(got_gradients, want_gradients, strict=True):
        largest = max(gradient.abs().max() for gradient in want_step)
        for a, b in zip(step, want_step, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * largest)
    for key, value in want.items():  # batch norms' and observers'
        torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance, msg=key)
    assert got["1.num_batches_tracked"] == got["6.num_batches_tracked"] == 3 * passes


def test_a_pass_gives_the_same_again_until_a_step_ends():
    model, x = prepared(), data()
    first = model(x)
    assert torch.equal(model(x), first)
    with torch.no_grad():
        assert torch.equal(model(x), first)
    first.sum().backward()
    second = model(x)
    assert not torch.equal(second, first)
    state = copy.deepcopy(model.state_dict())
    for begin in (model.train, lambda: model.load_state_dict(state), lambda: model.eval().train()):
        assert torch.equal(model(x), second)  # in the same step
        begin()
        third = model(x)
        assert not torch.equal(third, second)
        second = third


def test_a_resumed_model_takes_the_same_steps():
    model = prepared()
    steps(model, model)
    resumed = prepared()
    resumed(data())  # of no consequence
    resumed.load_state_dict(model.state_dict())
    (want, _), (got, _) = steps(model, model), steps(resumed, resumed)
    assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.compiled
@pytest.mark.parametrize("passes", [1, 2])
def test_compiled_training_has_eagers_gradients_and_statistics(passes, compiler):
    """Each step starts from the same state, because a difference in the last bit could change a rounding of the next
    step."""
    eager, model = prepared(), prepared()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)

    def in_a_step_of_its_own(x):
        eager.train()  # compiled code reads the variance in each pass
        return eager(x)

    for _ in range(2):
        model.load_state_dict(eager.state_dict())
        (gradients,), state = steps(model, compiled, passes, count=1)
        (want_gradients,), want = steps(eager, in_a_step_of_its_own, passes, count=1)
        assert relative_error(*(torch.cat([g.flatten() for g in all_]) for all_ in (gradients, want_gradients))) < 1e-3
        for key, value in want.items():
            if "running" in key or "num_batches" in key:
                torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
def test_checkpointing_of_compiled_code_changes_no_gradient(name, compiler):
    model, other = prepared(2), prepared(2)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    (got,), _ = steps(model, lambda x: CALLS[name](compiled, x), count=1)
    (want,), _ = steps(other, other, count=1)
    assert relative_error(*(torch.cat([g.flatten() for g in all_]) for all_ in (got, want))) < 1e-3


def test_a_frozen_layer_follows_its_running_variance():
    """No gradient passes through the first layer and its norm, so each pass is a separate step."""
    model, x = prepared(), data()
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        model.get_parameter(name).requires_grad_(False)
    step = next(module for module in model.modules() if isinstance(module, StepVariance))
    for name in ("directly", "checkpointed") * 2:
        running = model.get_buffer("1.running_var").clone()
        CALLS[name](model, x).sum().backward()
        assert torch.equal(step.variance, running) and not torch.equal(model.get_buffer("1.running_var"), running)


def test_copies_and_moves_keep_the_variance_of_the_step():
    model, x = prepared(), data()
    first = model(x)
    assert torch.equal(copy.deepcopy(model)(x), first)
    assert not any("step" in key for key in model.state_dict())
