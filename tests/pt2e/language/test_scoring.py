import copy

import pytest
import torch

from pt2mx.pt2e.language import scoring
from pt2mx.pt2e.language.scoring import context_length, continuations, log_likelihoods, rolling_pairs
from tests.language_models import decoder_by_recipe, tokenizer_of_bytes


@pytest.fixture(scope="module", params=["llama", pytest.param("mamba", marks=pytest.mark.compiled)])
def model(request):
    """A model whose caches keep every token, and one with recurrent layers."""
    quantized = copy.copy(decoder_by_recipe("mxfp4_weight_only", request.param))
    quantized.tokenizer = tokenizer_of_bytes()
    return quantized


def texts(seed=0, count=7):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count, 2), generator=generator).tolist()
    return [tuple(torch.randint(256, (n,), generator=generator).tolist() for n in pair) for pair in lengths]


def by_definition(model, context, continuation):
    """The log-likelihood of each token given all tokens before it, read without a batch."""
    with torch.no_grad():
        log = model(torch.tensor([[*context, *continuation]])).logits[0].double().log_softmax(-1)
    steps = [log[len(context) + i - 1] for i in range(len(continuation))]
    value = sum(float(step[token]) for step, token in zip(steps, continuation, strict=True))
    return value, all(int(step.argmax()) == token for step, token in zip(steps, continuation, strict=True))


def greedy(model, prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow_cases("mamba-*")
@pytest.mark.parametrize("columns", [1024, 5])
@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_log_likelihoods(model, batch_size, columns, monkeypatch):
    monkeypatch.setattr(scoring, "_COLUMNS", columns)
    pairs = texts()
    pairs += [(pairs[0][0], greedy(model, pairs[0][0], 4)), (pairs[1][0], [*pairs[1][1][:-1], 5])]
    results = log_likelihoods(model, pairs, batch_size)
    expected = [by_definition(model, *pair) for pair in pairs]
    assert [value for value, _ in results] == pytest.approx([value for value, _ in expected], rel=1e-5)
    assert [same for _, same in results] == [same for _, same in expected]
    assert results[-2][1] and not all(same for _, same in results)


@pytest.mark.compiled_cases("mamba")
def test_equal_texts_are_read_once(model, monkeypatch):
    read = []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, tokens, **options: read.append(tokens) or forward(self, tokens, **options)
    )
    answers = [([1, 2, 3], [token]) for token in (7, 8, 9)]
    results = log_likelihoods(model, answers, batch_size=8)
    assert [tokens.tolist() for tokens in read] == [[[1, 2, 3]]]
    assert results == [pytest.approx(by_definition(model, *pair)) for pair in answers]


def test_an_empty_continuation_is_certain(model):
    assert log_likelihoods(model, [([1, 2], [])]) == [(0, True)] and log_likelihoods(model, []) == []


@pytest.mark.parametrize(("count", "length"), [(10, 4), (8, 4), (3, 4), (1, 1), (5, 1)])
def test_windows_predict_each_token_once(count, length):
    text, pairs = list(range(count)), list(rolling_pairs(range(count), -1, length))
    assert [token for _, continuation in pairs for token in continuation] == text
    for context, continuation in pairs:
        read = [*context, *continuation[:-1]]
        end = continuation[-1]  # the tokens are their positions
        assert read == [-1, *text][max(0, end + 1 - length) : end + 1]


def test_the_windows_of_an_example():
    assert list(rolling_pairs(range(10), -1, 4)) == [([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert list(rolling_pairs([], -1, 4)) == []


@pytest.mark.compiled_except("llama-2")
@pytest.mark.slow_cases("mamba-1", "mamba-2")
@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_continuations(model, batch_size):
    prompts = [context for context, _ in texts(1)]
    expected = [model.tokenizer.decode(greedy(model, prompt, 8), skip_special_tokens=True) for prompt in prompts]
    assert continuations(model, prompts, length=8, batch_size=batch_size) == expected
    stop = expected[2][3:5]
    assert continuations(model, prompts, [stop], 8, batch_size) == [text.partition(stop)[0] for text in expected]


def test_a_stop_string_in_the_prompt_ends_no_text(model):
    prompt = model.tokenizer("a stop, a")["input_ids"]
    text = continuations(model, [prompt], length=6)
    assert continuations(model, [prompt], ["stop", "a" + text[0][0]], 6) == text


def test_generation_ends_after_the_stop_string(model, monkeypatch):
    given = []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda *a, **k: given.append(generate(*a, **k)) or given[-1])
    prompt = [72, 101]
    text = continuations(model, [prompt], length=60)[0]
    continuations(model, [prompt], [text[1]], 60)
    assert given[0].shape[1] == 62 and given[1].shape[1] <= 5


def test_context_length(model):
    limit = getattr(model.config, "max_position_embeddings", None)
    assert context_length(model) == (limit or 2048)
