import torch

from pt2mx.pt2e.optimize import hessian_observer
from pt2mx.pt2e.optimize.hessian_observer import MXHessianObserver, part_size


def flat(x):
    return x.reshape(1, -1, x.shape[-1])


def test_sums_over_batches():
    observer = MXHessianObserver(flat, 40)
    batches = [torch.randn(3, 5, 40), torch.randn(2, 40, dtype=torch.bfloat16), torch.randn(0, 40)]
    for batch in batches:
        assert observer(batch) is batch
    rows = torch.cat([batch.float().reshape(-1, 40) for batch in batches])
    assert observer.count == 17 and torch.equal(observer.amax, rows.abs().amax(0, keepdim=True))
    torch.testing.assert_close(observer.parts, [(rows.T @ rows).unsqueeze(0)])
    torch.testing.assert_close(observer.mean_squares(), rows.square().mean(0, keepdim=True))


def test_many_columns_are_summed_in_parts(monkeypatch):
    monkeypatch.setattr(hessian_observer, "_COLUMNS", 64)
    sizes = ((64, 7, 32), (70, 10, 32), (70, 33, 32), (130, 130, 32), (130, 130, 48), (130, 130, 100), (130, 130, 999))
    assert [part_size(*each) for each in sizes] == [64, 60, 33, 64, 48, 100, 130]
    observer, x = MXHessianObserver(flat, 10), torch.randn(5, 70)
    observer(x)
    whole = x.T @ x
    torch.testing.assert_close(observer.parts, [whole[None, :60, :60], whole[None, 60:, 60:]])
    assert observer.mean_squares().shape == (1, 70)


def test_many_rows_are_sampled(monkeypatch):
    monkeypatch.setattr(hessian_observer, "ROWS", 10)
    observer = MXHessianObserver(flat, 1)
    observer(torch.arange(100.0).unsqueeze(1))
    assert observer.count == 10 and observer.amax.item() == 90
