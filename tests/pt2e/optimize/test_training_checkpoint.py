"""Distillations that are stopped and go on."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.optimize.distill import distill
from pt2mx.pt2e.optimize.losses import relative_error
from tests.models import chain
from tests.rank_processes import results_of_ranks
from tests.training_models import InterruptedLoss

QUANTIZER = MXQuantizer.from_recipe("mxfp4")


def net(dtype=torch.float32):
    """Layers that draw random numbers, and one that writes to buffers; nine batches."""
    torch.manual_seed(0)
    batches = [torch.randn(16, 32).to(dtype) for _ in range(9)]
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.ReLU()) for _ in range(2))
    model = chain(layers=nn.Sequential(*layers), norm=nn.BatchNorm1d(32))
    return torch.export.export(model.to(dtype), (batches[0],)).module(), batches


def trained(folder, dtype=torch.float32, stop=None, **options):
    """The tensors after a training, None after one that was stopped at a call of the loss."""
    exported, batches = net(dtype)
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    loss = InterruptedLoss(relative_error, stop)
    try:
        distill(prepared, exported, batches, loss, lr=1e-3, epochs=2, checkpoint=folder, **options)
    except KeyboardInterrupt:
        return None, loss.calls
    return {name: tensor.detach().clone() for name, tensor in prepared.state_dict().items()}, loss.calls


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("dtype", "recompute"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.compiled_cases("dtype1-True")
def test_it_goes_on_with_the_same_steps(tmp_path, dtype, recompute):
    wanted, calls = trained(tmp_path / "whole", dtype, recompute=recompute)
    assert trained(tmp_path / "stopped", dtype, stop=30, recompute=recompute) == (None, 30)
    (kept,) = (tmp_path / "stopped").iterdir()
    assert 0 < int(kept.name) < 14
    actual, rest = trained(tmp_path / "stopped", dtype, recompute=recompute)
    assert rest < calls - 10 and equal(actual, wanted)
    # one that has ended gives its result again
    again, none = trained(tmp_path / "stopped", dtype, recompute=recompute)
    assert none == 0 and equal(again, wanted)


def test_other_settings_are_refused(tmp_path):
    trained(tmp_path)
    with pytest.raises(MXError, match="holds a training with decay='linear', not decay='cosine': give the same, or"):
        trained(tmp_path, decay="cosine")


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_file_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(MXError, match=f"{name}' cannot be a folder: .*; name another one"):
        trained(tmp_path / name)


def tokens(last=0):
    """Batches of which the last ends with another token."""
    return [torch.tensor([[1, 2, 0]]) for _ in range(8)] + [torch.tensor([[1, 2, last]])]


def recipe(**fields):
    return MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4", **fields))


@pytest.mark.compiled_except("quantizer0-*", "quantizer4-*", "quantizer5-*")
@pytest.mark.parametrize(
    ("quantizer", "weight", "batches", "differing"),
    [
        (recipe(activation="mxfp8"), 1.0, tokens(), "formats='2 mxfp4_e2m1"),
        (recipe(gradient="mxfp8"), 1.0, tokens(), "recipe="),
        (recipe(ste="clipped"), 1.0, tokens(), "recipe="),
        (recipe(), 0.5, tokens(), "float weights="),
        (recipe(), 1.0, tokens(3), "inputs="),
        (recipe(), 1.0, tokens() * 2, "batches=9"),
    ],
)
def test_another_training_is_refused(tmp_path, quantizer, weight, batches, differing):
    def train(quantizer, weight, batches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 32), nn.Linear(32, 32))
        nn.init.constant_(model[1].weight, weight)
        exported = torch.export.export(model, (batches[0],)).module()
        prepared = pt2mx.prepare_qat_pt2e(exported, quantizer)
        distill(prepared, exported, batches, checkpoint=tmp_path)

    train(recipe(), 1.0, tokens())
    train(recipe(), 1.0, tokens())
    with pytest.raises(MXError, match=f"holds a training with {differing}"):
        train(quantizer, weight, batches)


@pytest.mark.parametrize("batch", [torch.arange(8)[::2], torch.tensor([1]).expand(4)])
def test_batches_of_any_strides(tmp_path, batch):
    exported = torch.export.export(nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32)), (batch,)).module()
    for _ in range(2):
        distill(pt2mx.prepare_qat_pt2e(exported, recipe()), exported, [batch] * 9, checkpoint=tmp_path)


def test_tensors_that_the_checkpoint_lacks(tmp_path):
    exported, batches = net()
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    distill(prepared, exported, batches, checkpoint=tmp_path)
    prepared.register_parameter("other", nn.Parameter(torch.ones(1)))
    with pytest.raises(MXError, match="holds the training of another model: without 'other'"):
        distill(prepared, exported, batches, checkpoint=tmp_path)


def train_on_rank(rank, folder):
    group = torch.distributed.group.WORLD
    results = [trained(f"{folder}/whole", group=group)[0]]
    trained(f"{folder}/stopped", group=group, stop=16)
    results.append(trained(f"{folder}/stopped", group=group)[0])
    trained(f"{folder}/half", group=group, stop=16)
    return results


@pytest.mark.compiled
def test_ranks_go_on_together_and_one_process_goes_on_alone(tmp_path):
    (whole, resumed), second = results_of_ranks(train_on_rank, str(tmp_path))
    assert equal(resumed, whole) and equal(second[0], whole) and equal(second[1], whole)
    alone, _ = trained(tmp_path / "half", accumulate=2)
    for name, tensor in whole.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(alone[name], tensor, rtol=0, atol=5e-3)
