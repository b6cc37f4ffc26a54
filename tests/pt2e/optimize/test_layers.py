"""Models cut into layers: their values, gradients and steps, in one process and on ranks."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.pt2e.optimize.distill import distill
from pt2mx.pt2e.optimize.layers import layered
from tests.models import Residual, chain
from tests.rank_processes import results_of_ranks

QUANTIZER = MXQuantizer.from_recipe("mxfp4")


def residual():
    up, down = nn.Linear(32, 64), nn.Linear(64, 32)
    return Residual(OrderedDict(norm=nn.LayerNorm(32), up=up, relu=nn.ReLU(), down=down))


class Decoder(nn.Module):
    """A head that is tied to the embedding; the last layer shares a weight with the first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(64, 32), nn.Sequential(*(residual() for _ in range(3)))
        self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, ids):
        return self.layers(self.embedding(ids)) @ self.embedding.weight.T


class Times(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.linear = number, nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x) * self.number


def norms():
    """Layers that write to their buffers, which stay in the graph, after one that does not."""
    layers = (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(2))
    return chain(first=nn.Sequential(residual(), residual()), layers=nn.Sequential(*layers))


def decoder():
    """The float program, the prepared model and nine batches of tokens."""
    torch.manual_seed(0)
    batches = [torch.randint(0, 64, (4, 8)) for _ in range(9)]
    exported = torch.export.export(Decoder().eval(), (batches[0],)).module()
    return exported, pt2mx.prepare_qat_pt2e(exported, QUANTIZER), batches


def values(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def layers_of(model):
    return [name for name, _ in model.named_children() if name.startswith("layer_")]


def assert_close(actual, expected, rtol=1e-4, atol=1e-6):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_values_gradients_and_names_are_those_of_the_model(recompute):
    _, prepared, (ids, *_) = decoder()
    model, names = layered(prepared, recompute, False, None)
    own = {**dict(prepared.named_parameters(remove_duplicate=False)), **dict(prepared.named_buffers())}
    assert all(own[name] is tensor for name, tensor in names.items())
    assert {*names.values()} >= {*prepared.parameters()}
    assert layers_of(model) == ["layer_0", "layer_1", "layer_2"]
    wanted = prepared(ids)
    wanted.square().sum().backward()
    gradients = [parameter.grad for parameter in prepared.parameters()]
    prepared.zero_grad()
    actual = model(ids)
    assert torch.equal(actual, wanted)
    actual.square().sum().backward()
    assert all(torch.equal(p.grad, want) for p, want in zip(prepared.parameters(), gradients, strict=True))


def test_layers_that_write_stay_in_the_graph():
    torch.manual_seed(0)
    batches = [torch.randn(16, 32) for _ in range(9)]
    exported = torch.export.export(norms(), (batches[0],)).module()
    models = [pt2mx.prepare_qat_pt2e(exported, QUANTIZER) for _ in range(2)]
    model, _ = layered(models[0], True, False, None)
    assert layers_of(model) == ["layer_0", "layer_1"]
    first, second = (
        values(distill(one, exported, batches, recompute=recompute))
        for one, recompute in zip(models, (False, True), strict=True)
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not torch.equal(first["layers.0.1.running_mean"], exported.state_dict()["layers.0.1.running_mean"])


def test_gradients_of_several_batches_are_averaged():
    exported, prepared, (ids, *_) = decoder()
    other = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    four, pairs = (
        values(distill(model, exported, [ids] * n, accumulate=k)) for model, n, k in [(other, 5, 1), (prepared, 9, 2)]
    )
    assert all(torch.equal(tensor, pairs[name]) for name, tensor in four.items())


def test_layers_that_differ_in_tensors_alone_are_compiled_once():
    _, prepared, _ = decoder()
    model, _ = layered(prepared, False, True, None)
    assert len({model.get_submodule(f"{name}.body") for name in layers_of(model)}) == 1
    tensors = [{*map(id, model.get_submodule(name).parameters())} for name in layers_of(model)]
    assert all(tensors) and tensors[0] != tensors[1]


def test_other_numbers_are_other_code():
    model = chain(layers=nn.Sequential(*(Times(number) for number in (2.0, 2.0, 3.0))))
    exported = torch.export.export(model.eval(), (torch.randn(4, 32),)).module()
    model, _ = layered(pt2mx.prepare_qat_pt2e(exported, QUANTIZER), False, True, None)
    first, second, third = (model.get_submodule(f"{name}.body") for name in layers_of(model))
    assert first is second and third is not first


def test_modules_with_a_state_are_not_shared():
    exported, _, _ = decoder()
    quantizer = MXQuantizer.from_recipe("mxfp4").set_global(pt2mx.MXQuantizationConfig("mxfp4(stochastic)"))
    model, _ = layered(pt2mx.prepare_qat_pt2e(exported, quantizer), False, True, None)
    assert layers_of(model) and not any(hasattr(model.get_submodule(name), "body") for name in layers_of(model))


@pytest.mark.compiled
def test_compiled_steps():
    exported, prepared, batches = decoder()
    wanted = values(distill(pt2mx.prepare_qat_pt2e(exported, QUANTIZER), exported, batches))
    assert_close(values(distill(prepared, exported, batches, compile=True, recompute=True)), wanted, 1e-3, 1e-4)
    assert prepared._compiled_call_impl is None


def train_on_rank(rank, options):
    exported, prepared, batches = decoder()
    group = torch.distributed.group.WORLD
    return values(distill(prepared, exported, batches, group=group, **options))


@pytest.mark.compiled
def test_two_ranks_take_the_steps_of_one_with_twice_as_many_batches():
    first, second = results_of_ranks(train_on_rank, {"lr": 1e-3, "recompute": True})
    exported, prepared, batches = decoder()
    wanted = values(distill(prepared, exported, batches, lr=1e-3, accumulate=2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert_close(first, wanted)
    assert not torch.equal(first["embedding.weight"], exported.state_dict()["embedding.weight"])


def test_slices_are_refused():
    exported, _, batches = decoder()
    anchor = pt2mx.prepare_qat_pt2e(exported, MXQuantizer.from_recipe("mxint8"))
    narrow = pt2mx.prepare_qat_pt2e(exported, QUANTIZER, anchor=anchor)
    with pytest.raises(MXError, match="slices train in one process, as they are: leave out recompute"):
        distill(anchor, exported, batches, slices=[narrow], recompute=True)
