import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.functional import fake_quantize_mx
from pt2mx.pt2e.optimize.index_observer import MXIndexObserver

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=None))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.bag = nn.Embedding(40, 64), nn.EmbeddingBag(10, 64)

    def forward(self, ids, mask, items):
        return self.tokens(ids) * mask.unsqueeze(-1), self.bag(items)


def share(weight, rounded, counts):
    errors, energies = (tensor.square().sum(1) for tensor in (weight - rounded, weight))
    return float((errors * counts).sum() / (energies * counts).sum())


def test_counts():
    observer = MXIndexObserver(5)
    for ids in (torch.tensor([4, 1]), torch.tensor([[1, 0]], dtype=torch.int32), torch.empty(0, dtype=torch.int64)):
        observer(ids)
    observer(torch.tensor([-1, 7]))  # of which the embedding says that there are none
    assert observer.counts.tolist() == [1, 2, 0, 0, 1]


@pytest.mark.parametrize("padding_mask", [None, "mask"])
def test_the_report_counts_rows_as_often_as_they_are_read(padding_mask):
    torch.manual_seed(0)
    model = Embedded().eval()
    ids, mask, items = torch.randint(0, 20, (4, 6)), torch.ones(4, 6), torch.randint(0, 10, (3, 5))
    mask = mask.to(torch.int64)
    mask[:, 4:] = 0
    exported = torch.export.export(model, (ids, mask, items)).module()
    optimized = pt2mx.optimize(exported, QUANTIZER, [(ids, mask, items)] * 2, padding_mask=padding_mask)
    read = ids if padding_mask is None else ids[mask != 0]
    spec = pt2mx.MXSpec("fp4_e2m1", axis=-1)
    for row, indices in zip(pt2mx.optimization_report(optimized).weights, (read, items), strict=True):
        weight = model.get_parameter(row.weight).detach()
        counts = torch.bincount(indices.flatten(), minlength=len(weight))
        assert row.algorithm == "scales"
        assert row.before == pytest.approx(share(weight, fake_quantize_mx(weight, spec), counts), rel=1e-5)
        now = optimized.get_parameter(row.weight).detach()
        assert row.after == pytest.approx(share(weight, now, counts), rel=1e-5)
        assert not torch.equal(weight, now)


def test_without_a_look_at_inputs_all_rows_count():
    torch.manual_seed(0)
    model = nn.Embedding(40, 64)
    exported = torch.export.export(model, (torch.zeros(2, dtype=torch.int64),)).module()
    (row,) = pt2mx.optimization_report(pt2mx.optimize(exported, QUANTIZER, preset="fast")).weights
    weight = model.weight.detach()
    rounded = fake_quantize_mx(weight, pt2mx.MXSpec("fp4_e2m1", axis=-1))
    assert row.before == pytest.approx(share(weight, rounded, torch.ones(40)), rel=1e-5)
