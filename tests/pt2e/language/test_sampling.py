from types import SimpleNamespace

import pytest
import torch

from pt2mx.pt2e.language.sampling import Choice, processors_of
from tests.language_models import transformers

ENDS = torch.tensor([7, 900, 7, -1])  # the second and the last one are outside of the vocabulary
#: class of transformers -> arguments
CASES = {
    "TemperatureLogitsWarper": (0.7,),
    "TopKLogitsWarper": (5,),
    "TopPLogitsWarper": (0.8,),
    "MinPLogitsWarper": (0.1,),
    "TypicalLogitsWarper": (0.5,),
    "EpsilonLogitsWarper": (0.01,),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "RepetitionPenaltyLogitsProcessor": (1.3,),
    "MinLengthLogitsProcessor": (10, ENDS),
    "MinNewTokensLengthLogitsProcessor": (4, 6, ENDS),
    "SuppressTokensLogitsProcessor": ([1, 2, 299],),
}


def processor(name, *arguments):
    return getattr(transformers, name)(*arguments)


def history(ids, vocabulary=300):
    seen = torch.zeros(len(ids), vocabulary, dtype=torch.bool).scatter_(1, ids, True)
    return SimpleNamespace(seen=seen, length=torch.tensor([ids.shape[1]]))


@pytest.mark.parametrize("name", CASES)
def test_a_processor_gives_the_scores_of_transformers(name):
    original = processor(name, *CASES[name])
    (ours,) = processors_of([original])
    for length in (9, 10):  # the last one without an end, and the first one with it
        ids, scores = torch.randint(300, (3, length)), torch.randn(3, 300) * 4
        scores[0, 5] = torch.inf if name == "InfNanRemoveLogitsProcessor" else -torch.inf
        assert torch.equal(ours.call(scores, history(ids)), original(ids, scores))


def test_the_scores_of_a_minimum_length_depend_on_the_length():
    (ours,) = processors_of([processor("MinLengthLogitsProcessor", 10, ENDS)])
    scores = torch.zeros(1, 300)
    before, after = (ours.call(scores, history(torch.zeros(1, n, dtype=torch.long)))[0, 7] for n in (9, 10))
    assert before == -torch.inf and after == 0


def test_processors_of_equal_keys_compute_the_same():
    for name, arguments in CASES.items():
        (one,), (other,) = (processors_of([processor(name, *arguments)]) for _ in range(2))
        assert one == other and hash(one) == hash(other)
    for name, arguments in (
        ("TopKLogitsWarper", (6,)),
        ("TopPLogitsWarper", (0.8, -torch.inf, 2)),
        ("RepetitionPenaltyLogitsProcessor", (1.4,)),
        ("MinLengthLogitsProcessor", (11, ENDS)),
        ("SuppressTokensLogitsProcessor", ([1, 2],)),
    ):
        (one,), (other,) = (processors_of([processor(name, *given)]) for given in (arguments, CASES[name]))
        assert one != other


class Own(transformers.TemperatureLogitsWarper):
    """A class of a user, which may compute anything."""


@pytest.mark.parametrize(
    "unknown",
    [
        Own(0.5),
        type("TemperatureLogitsWarper", (Own,), {})(0.5),
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_unknown_processors(unknown):
    assert processors_of([transformers.TemperatureLogitsWarper(0.5), unknown]) is None
    assert processors_of([]) == ()


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_drawn_as_by_multinomial(batch):
    scores, choice = torch.randn(batch, 300) * 3, Choice((), True, (), None)
    torch.manual_seed(5)
    expected = [torch.multinomial(scores.softmax(-1), 1)[:, 0] for _ in range(40)]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert all(torch.equal(choice.weights(scores).argmax(-1), one) for one in expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert Choice((), False, (), None).weights(scores) is scores


def test_scores_go_through_processors_in_order():
    given = [transformers.TemperatureLogitsWarper(0.5), transformers.TopKLogitsWarper(2)]
    choice = Choice(processors_of(given), False, (), None)
    scores = choice.scores(torch.tensor([[1.0, 3.0, 2.0]]), history(torch.zeros(1, 1, dtype=torch.long), 3))
    assert scores.tolist() == [[-torch.inf, 6.0, 4.0]]
