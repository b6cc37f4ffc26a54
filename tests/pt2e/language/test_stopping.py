import time

import pytest
import torch

from pt2mx.pt2e.language.step_loop import Stopping
from tests.language_models import tokenizer_of_bytes, transformers

IDS = torch.tensor([[1, 2], [3, 4]])
LENGTH = transformers.MaxLengthCriteria(8)
END = transformers.generation.stopping_criteria.EosTokenCriteria([5, 6])
STRING = transformers.StopStringCriteria(tokenizer_of_bytes(), ["a"])


class Sum(transformers.StoppingCriteria):
    """End a sequence whose tokens have this sum."""

    def __init__(self, total):
        self.total = total

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) == self.total


def test_length_and_ends_are_of_the_step():
    stopping = Stopping([LENGTH, END, transformers.MaxLengthCriteria(6)], IDS)
    assert (stopping.longest, stopping.ends, stopping.pads, stopping.ends_rows) == (6, (5, 6), True, False)
    assert stopping.stops(torch.tensor([5, 5]), None) is None
    assert Stopping([], IDS).longest is None and not Stopping([LENGTH], IDS).pads


def test_the_host_ends_single_sequences():
    stopping = Stopping([LENGTH, Sum(10)], IDS)
    assert stopping.ends_rows and not stopping.pads
    assert stopping.stops(torch.tensor([1, 3]), None).tolist() == [False, True]
    assert stopping.stops(torch.tensor([6, 3]), None).tolist() == [True, False]


def test_a_time_is_of_all_sequences():
    late = transformers.MaxTimeCriteria(1.0, time.time() - 2)
    stopping = Stopping([LENGTH, late], IDS)
    assert not stopping.ends_rows
    assert stopping.stops(torch.tensor([0, 0]), None).tolist() == [True, True]


def test_a_text_longer_than_the_model_was_made_for(monkeypatch):
    texts, logger = [], transformers.generation.stopping_criteria.logger
    monkeypatch.setattr(logger, "warning_once", texts.append)
    stopping = Stopping([transformers.MaxLengthCriteria(8, max_position_embeddings=2)], IDS)
    assert stopping.stops(torch.tensor([0, 0]), None).tolist() == [False, False]
    assert len(texts) == 1 and "maximum length (2)" in texts[0] and not stopping.ends_rows


def test_the_device_of_the_tokens():
    """Tokens go to the host, unless a criterion of the user may need them where they were."""
    assert Stopping([LENGTH, Sum(0)], IDS.to("meta"))._ids.device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):  # which has no data
        Stopping([LENGTH, STRING], IDS.to("meta"))
    assert Stopping([LENGTH, STRING], IDS).stops(torch.tensor([97, 64]), None).tolist() == [False, True]
