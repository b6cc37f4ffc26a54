"""The texts of answers: where they end, and which part is printed before it is known how they go on."""

import pytest
import torch

from pt2mx.pt2e.cli.answers import count_same, settled, until_end
from pt2mx.pt2e.language.texts import until_stop
from tests.language_models import transformers


@pytest.mark.parametrize(
    ("text", "stops", "expected", "printed"),
    [
        ("one two", [], "one two", "one two"),
        ("one. two", ["."], "one", "one"),
        ("a\n\nb", ["b", "\n\n"], "a", "a"),
        ("one\n", ["\n\n"], "one\n", "one"),  # a second newline would end it
        ("one <", ["</s>", "< "], "one <", "one "),
        ("one </x", ["</s>"], "one </x", "one </x"),
        ("aab", ["aabb"], "aab", ""),
        ("", ["x"], "", ""),
    ],
)
def test_stops(text, stops, expected, printed):
    assert until_stop(text, stops) == expected and settled(text, stops) == printed


@pytest.mark.parametrize(
    ("end", "pad", "row", "expected"),
    [
        (7, 0, [1, 2, 7, 0, 0], [1, 2, 7]),
        (7, 0, [1, 2, 3], [1, 2, 3]),
        ([7, 8], 8, [1, 8, 8], [1, 8]),
        (7, 0, [1, 0, 0], [1]),  # ended by a stop text
        (None, None, [1, 0], [1, 0]),
    ],
)
def test_tokens_of_a_row_of_a_batch(end, pad, row, expected):
    model = torch.nn.Module()
    model.generation_config = transformers.GenerationConfig(eos_token_id=end, pad_token_id=pad)
    assert until_end(row, model) == expected


@pytest.mark.parametrize(("one", "other", "same"), [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([], [1], 0)])
def test_agreement(one, other, same):
    assert count_same(one, other) == same
