import math

import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.language.texts import BLOCK, blocks, built_in_text, perplexity, read_text, until_stop
from tests.language_models import tokenizer_of_bytes


def test_of_known_predictions():
    text = torch.tensor([[0, 1, 2, 1]])

    def even(block):
        return torch.zeros(1, block.shape[1], 3)

    def sure(block):  # of the last token before it was said: 1, 2, 1
        return torch.nn.functional.one_hot(torch.tensor([[1, 2, 1, 0]]), 3) * math.log(2.0)  # 1/4, 1/4, 1/2

    result = perplexity(even, [text])
    assert (result.tokens, result.divergence, result.agreement) == (3, None, None)
    assert result.perplexity == pytest.approx(3)
    result = perplexity(sure, [text, text], even)
    assert result.tokens == 6 and result.perplexity == pytest.approx(2)
    # sum of 1/3 log((1/3) / q)
    assert result.divergence == pytest.approx((2 * math.log(4 / 3) + math.log(2 / 3)) / 3)
    assert result.agreement == pytest.approx(0)  # the first of equals is 0
    assert perplexity(sure, [text], sure).agreement == 1 and perplexity(sure, [text], sure).divergence == 0


@pytest.mark.parametrize("text", [[], [torch.tensor([[1]])]])
def test_of_no_token(text):
    with pytest.raises(MXError, match="no token to predict"):
        perplexity(lambda block: torch.zeros(1, block.shape[1], 3), text)


def test_of_tokens_that_are_ruled_out_or_nearly():
    text = torch.tensor([[0, 1, 1]])

    def masked(logit, other=0.0):
        return lambda block: torch.tensor([logit, other, -math.inf]).expand(1, block.shape[1], 3)

    result = perplexity(masked(0.0), [text], masked(0.0))
    assert (result.perplexity, result.divergence, result.agreement) == (pytest.approx(2), 0, 1)
    result = perplexity(masked(1.0), [text], masked(0.0))
    assert result.divergence == pytest.approx(math.log((1 + math.e) / 2) - 0.5)
    assert perplexity(masked(709.0), [text]).perplexity == pytest.approx(math.exp(709))
    assert perplexity(masked(800.0), [text]).perplexity == math.inf
    assert perplexity(masked(0.0, -math.inf), [text]).perplexity == math.inf
    assert math.isnan(perplexity(masked(math.nan), [text]).perplexity)


def test_blocks_of_text(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert read_text(str(tmp_path)) == "first\n\nsecond" and read_text(str(tmp_path / "b.txt")) == "second"
    tokenizer = tokenizer_of_bytes()
    text = "x" * (2 * BLOCK + 1)  # the last block has one token, so nothing can be predicted
    assert [block.shape for block in blocks(text, tokenizer)] == [(1, BLOCK)] * 2
    assert [block.shape for block in blocks(text, tokenizer, 700)] == [(1, BLOCK), (1, 700 - BLOCK)]
    assert len(blocks(built_in_text(), tokenizer)) > 4


def test_what_is_no_text(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "empty.txt").write_text(" \n")
    tokenizer = tokenizer_of_bytes()
    for call, text in [
        (lambda: read_text(str(tmp_path / "no.txt")), "no text in"),
        (lambda: read_text(str(tmp_path / "empty.txt")), "no text in"),
        (lambda: read_text(str(tmp_path / "latin.txt")), "no text in UTF-8"),
        (lambda: blocks("x", tokenizer), "fewer than two tokens"),
        (lambda: blocks("text", None), "holds no tokenizer"),
    ]:
        with pytest.raises(MXError, match=text):
            call()


@pytest.mark.parametrize(
    ("stops", "text"),
    [(["cd", "b"], "a"), (["b", "cd"], "a"), (["bcd"], "a"), (["ab"], ""), (["x"], "abcd"), ([], "abcd")],
)
def test_the_first_stop_string_ends_a_text(stops, text):
    assert until_stop("abcd", stops) == text
