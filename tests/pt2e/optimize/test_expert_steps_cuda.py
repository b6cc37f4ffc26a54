"""Experts that train on GPUs: one, and two that share the parameters."""

import pytest
import torch

import pt2mx
from pt2mx import MXQuantizer, distill
from tests.mixtures import batches, mixtures
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.cuda

QUANTIZER = MXQuantizer.from_recipe("mxfp4_weights_mxfp8_activations")


def trained(device, dtype, **options):
    """The values after a training, on the host, and the last expert's before it."""
    inputs = [x.to(device) for x in batches(dtype)]
    exported = torch.export.export(mixtures(dtype).to(device), (inputs[0],)).module()
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    distill(prepared, exported, inputs, epochs=2, lr=1e-3, **options)
    return {name: tensor.detach().cpu() for name, tensor in prepared.state_dict().items()}


def assert_near(actual, expected):
    """Sums in another order round some values to other codes, which changes later steps."""
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            difference = (actual[name] - tensor).float().abs()
            assert difference.mean() < 1e-3 and difference.max() < 2e-2, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_cpu(dtype):
    assert_near(trained("cuda", dtype), trained("cpu", dtype))


def test_an_expert_without_tokens_keeps_its_bits():
    """The gradient of a group without rows is zero on a GPU, too."""
    inputs = [x.cuda() for x in batches(torch.bfloat16, rare=0)[1:]]  # the rare batch is left out
    exported = torch.export.export(mixtures(torch.bfloat16).cuda(), (inputs[0],)).module()
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    distill(prepared, exported, inputs, epochs=2, lr=1e-3)
    for name in ("up", "down", "up_bias", "down_bias"):
        before, after = (model.get_parameter(f"layers.0.{name}") for model in (exported, prepared))
        assert torch.equal(before[-1], after[-1]) and not torch.equal(before[0], after[0])


def train_on_rank(rank, folder):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        results.append(trained("cuda", dtype, group=group, recompute=True))
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus_take_the_steps_of_one(tmp_path):
    run_ranks(train_on_rank, str(tmp_path), method="spawn")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for dtype, one, other in zip((torch.float32, torch.bfloat16), first, second, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        assert_near(one, trained("cuda", dtype, accumulate=2))
