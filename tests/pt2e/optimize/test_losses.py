import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.optimize.losses import call_with_batch, hold_out, kl_divergence, relative_error


def test_relative_error():
    actual = {
        "a": torch.tensor([1.0, 3.0]),
        "n": torch.tensor([5]),
        "b": (torch.tensor([[2.0]], dtype=torch.bfloat16), 7),
    }
    expected = {
        "a": torch.tensor([1.0, 2.0]),
        "n": torch.tensor([6]),
        "b": (torch.tensor([[4.0]], dtype=torch.bfloat16), 7),
    }
    assert relative_error(actual, expected) == (1 / 5 + 4 / 16) / 2
    masked = torch.tensor([float("-inf"), 2.0])
    assert relative_error(masked, masked) == 0
    assert relative_error(masked.add(1).requires_grad_(), masked) == 0.25
    with pytest.raises(MXError, match="no float tensor"):
        relative_error(torch.tensor([1]), torch.tensor([1]))


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 1), (8, 1), (9, 2), (24, 3), (1000, 64)])
def test_one_of_eight_batches_is_held_out(count, size):
    train, others = hold_out(count, torch.Generator().manual_seed(0))
    assert len(others) == size and sorted({*train, *others}) == list(range(count))
    assert count == 1 or not set(train) & set(others)


def test_batches_by_position_by_name_and_alone():
    for batch in ((3, 4), {"a": 3, "b": 4}, [3, 4]):
        assert call_with_batch(lambda a, b=4: (a, b), batch) == (3, 4)
    assert call_with_batch(lambda a, b=4: (a, b), 3) == (3, 4)


def test_a_batch_that_is_written_stays():
    batch = {"x": torch.ones(2)}
    assert call_with_batch(lambda x: x.add_(1), batch).tolist() == [2, 2] and batch["x"].tolist() == [1, 1]


def test_divergence_of_predicted_classes():
    references, logits = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    p, q = references.double().softmax(2), logits.double().softmax(2)
    expected = (p * (p / q).log()).sum(2).mean()
    got = kl_divergence({"logits": logits + 7, "ids": torch.arange(3)}, {"logits": references, "ids": torch.arange(3)})
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert kl_divergence(references, references + 1).item() == pytest.approx(0, abs=1e-6)
    masked = torch.tensor([[0.0, float("-inf"), 1.0]])
    assert kl_divergence(masked.clone().requires_grad_(), masked) == 0
    assert kl_divergence(logits.bfloat16(), references).dtype == torch.float32
    with pytest.raises(MXError, match="no float tensor"):
        kl_divergence(torch.arange(3), torch.arange(3))
