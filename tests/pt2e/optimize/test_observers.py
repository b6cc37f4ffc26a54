import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, MXSpec, fake_quantize_mx, get_default_mx_quantization_config
from pt2mx.algorithms import gptq
from pt2mx.pt2e.optimize import calibrate, observers
from pt2mx.pt2e.optimize.observers import (
    MXHessianObserver,
    MXIndexObserver,
    Size,
    _largest,
    bytes_of_sums,
    part_size,
    sample,
    with_mean_expert,
)
from tests.models import module_of


def flat(x):
    return x.reshape(1, -1, x.shape[-1])


def test_sums_over_batches():
    observer = MXHessianObserver(flat, 40)
    batches = [torch.randn(3, 5, 40), torch.randn(2, 40, dtype=torch.bfloat16), torch.randn(0, 40)]
    for batch in batches:
        assert observer(batch) is batch
    rows = torch.cat([batch.float().reshape(-1, 40) for batch in batches])
    assert observer.count == 17 and observer.counts.tolist() == [17]
    assert torch.equal(observer.amax, rows.abs().amax(0, keepdim=True))
    torch.testing.assert_close(observer.parts, [(rows.T @ rows).unsqueeze(0)])


def test_many_columns_are_summed_in_parts():
    sizes = ((64, 7, 32), (70, 10, 32), (70, 33, 32), (130, 130, 32), (130, 130, 48), (130, 130, 100), (130, 130, 999))
    assert [part_size(*each, 64) for each in sizes] == [64, 60, 33, 64, 48, 100, 130]
    assert [part_size(3 * line, line, 32, 64) for line in (20, 96, 100, 128)] == [60, 32, 100, 64]  # three lines
    observer, x = MXHessianObserver(flat, 10, columns=64), torch.randn(5, 70)
    observer(x)
    whole = x.T @ x
    torch.testing.assert_close(observer.parts, [whole[None, :60, :60], whole[None, 60:, 60:]])


def test_many_rows_are_sampled(monkeypatch):
    monkeypatch.setattr(observers, "ROWS", 10)
    observer = MXHessianObserver(flat, 1)
    observer(torch.arange(100.0).unsqueeze(1))
    assert observer.count == 10
    taken = sample(100, torch.device("cpu"))
    assert (taken // 10).tolist() == list(range(10)) and len(set((taken % 10).tolist())) > 5
    torch.testing.assert_close(observer.parts[0].item(), float(taken.square().sum()))
    # rows with a period that divides the step: every position is sampled
    assert all(len(set((sample(10 * n, torch.device("cpu")) % n).tolist())) == n for n in (2, 4, 5))


def by_sizes(x, sizes):
    return [rows.unsqueeze(0) for rows in x.split(sizes.tolist())]


def test_groups_with_rows_of_their_own_number():
    observer = MXHessianObserver(by_sizes, 40, columns=32)
    batches = [(torch.randn(9, 40), torch.tensor([4, 0, 5])), (torch.randn(3, 40), torch.tensor([1, 0, 2]))]
    for x, sizes in [*batches, (torch.randn(0, 40), torch.tensor([0, 0, 0]))]:
        assert observer(x, sizes) is x
    assert observer.count == 12 and observer.counts.tolist() == [5, 0, 7]
    for group in range(3):
        rows = torch.cat([x.split(sizes.tolist())[group] for x, sizes in batches])
        hessian = rows.T @ rows
        torch.testing.assert_close(observer.parts[0][group], hessian[:32, :32])
        torch.testing.assert_close(observer.parts[1][group], hessian[32:, 32:])
        want = rows.abs().amax(0) if len(rows) else torch.zeros(40)
        assert torch.equal(observer.amax[group], want)


def test_experts_of_few_rows_have_some_of_the_mean_expert():
    parts = [torch.tensor([[[4.0]], [[0.0]], [[8.0]]]), torch.tensor([[[1.0]], [[0.0]], [[2.0]]])]
    counts = torch.tensor([4, 0, 8])
    # two columns: one of the 12 rows of the mean expert is added, and counts as a quarter of a row
    actual, rows = with_mean_expert(parts, counts)
    assert [part.flatten().tolist() for part in actual] == [[5.0, 1.0, 9.0], [1.25, 0.25, 2.25]]
    assert rows.tolist() == [4.25, 0.25, 8.25]


@pytest.mark.parametrize(("rows", "limit"), [(0, 0.7), (16, 0.8), (64, 1)])
def test_an_expert_of_few_rows_is_rounded_better_than_by_itself_or_to_nearest(rows, limit):
    torch.manual_seed(0)
    mixing, weight, spec = torch.randn(64, 64) * 0.8 ** torch.arange(64), torch.randn(32, 64), MXSpec("mxfp4", axis=1)
    observer = MXHessianObserver(by_sizes, 64)
    observer(torch.randn(400 + rows, 64) @ mixing.T, torch.tensor([200, rows, 200]))
    other = torch.randn(4096, 64) @ mixing.T

    def error(hessian, count):
        off = gptq(weight, hessian, spec, damping=0.01 + 0.5 * 64 / max(count, 1)) - weight
        return (other @ off.T).square().sum() / (other @ weight.T).square().sum()

    (hessians,), counts = with_mean_expert(observer.parts, observer.counts)
    alone = error(observer.parts[0][1], rows)  # rounds to nearest if an expert has no rows
    assert error(hessians[1], float(counts[1])) < limit * alone


def test_the_sums_of_all_observers_stay_within_a_budget():
    assert bytes_of_sums(Size(1, 4096, 4096, 32), 4096) == 64 << 20
    assert bytes_of_sums(Size(8, 96, 96, 32), 64) == 8 * 4 * (64**2 + 32**2)

    def columns_within(budget, sizes):
        placed = [MXHessianObserver(flat, size.line) for size in sizes]
        calibrate._place(placed, sizes, budget, 0)
        (columns,) = {observer.columns for observer in placed}
        return columns

    # the matmuls of a layer of Llama 3.1 8B: queries, output, gate, down
    layer = [Size(1, 4096, 4096, 32)] * 3 + [Size(1, 14336, 14336, 32)]
    actual = {gib: columns_within(gib << 30, layer * 32) for gib in (1, 4, 8, 16)}
    assert actual == {1: 256, 4: 1024, 8: 2048, 16: 4096}
    for gib, columns in actual.items():
        assert sum(bytes_of_sums(size, columns) for size in layer * 32) <= gib << 30
    # the matmuls of Qwen3 30B A3B: 128 experts
    experts = [Size(128, 2048, 2048, 32), Size(128, 768, 768, 32)] * 48
    assert columns_within(30 << 30, experts) == 256
    assert columns_within(0, layer) == 32


def test_the_sums_take_the_bytes_that_are_said():
    for k, line, block, columns in ((70, 10, 32, 64), (70, 35, 32, 32), (130, 130, 48, 64), (64, 64, 32, 64)):
        observer = MXHessianObserver(lambda x: x.repeat(3, 1, 1), line, block, columns)
        observer(torch.randn(2, k))
        assert sum(part.nbytes for part in observer.parts) == bytes_of_sums(Size(3, k, line, block), columns)


QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=None))


def share(weight, rounded, counts):
    errors, energies = (tensor.square().sum(1) for tensor in (weight - rounded, weight))
    return float((errors * counts).sum() / (energies * counts).sum())


def test_counts():
    observer = MXIndexObserver(5)
    for ids in (torch.tensor([4, 1]), torch.tensor([[1, 0]], dtype=torch.int32), torch.empty(0, dtype=torch.int64)):
        observer(ids)
    observer(torch.tensor([-1, 7]))  # invalid indices, which the embedding itself reports
    assert observer.counts.tolist() == [1, 2, 0, 0, 1]


@pytest.mark.parametrize("padding_mask", [None, "mask"])
def test_the_report_counts_rows_as_often_as_they_are_read(padding_mask):
    torch.manual_seed(0)
    model = module_of(
        lambda self, ids, mask, items: (self.tokens(ids) * mask.unsqueeze(-1), self.bag(items)),
        tokens=nn.Embedding(40, 64),
        bag=nn.EmbeddingBag(10, 64),
    ).eval()
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


@pytest.mark.parametrize("columns", [4096, 320])
def test_both_triangles_of_sums_between_batches(columns):
    """A CPU computes one triangle, in strips, and copies it when the sums are read."""
    observer, rows = MXHessianObserver(lambda x: x, line=640, columns=columns), torch.randn(4, 2, 50, 640)
    whole = torch.zeros(2, 640, 640)
    for batch in rows:
        observer(batch)
        whole += batch.mT @ batch
        parts = torch.arange(640).split(observer.parts[0].shape[1])
        for part, own in zip(observer.parts, parts, strict=True):
            torch.testing.assert_close(part, whole[:, own][:, :, own])


def test_largest_values_of_any_number_of_rows():
    for rows in (1, 7, 32, 100, 192):
        values = torch.randn(3, rows, 5)
        assert torch.equal(_largest(values), values.abs().amax(1))
        assert torch.equal(_largest(values.mT.contiguous().mT), values.abs().amax(1))
        values[1, rows // 2, 2] = torch.nan
        assert torch.equal(_largest(values).isnan().nonzero(), torch.tensor([[1, 2]]))
        assert _largest(values[..., :0]).shape == (3, 0)
