import copy
import time

import pytest
import torch

from pt2mx import LanguageModel, MXQuantizer
from pt2mx.pt2e.language import language_model, step
from pt2mx.pt2e.language.step import Stopping
from tests.language_models import exported_decoder, padded, quantized_decoder, tokenizer_of_bytes, transformers

#: a token that ends some texts of `padded`, at different steps, is chosen in `ends`
SAMPLED = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "epsilon": {"epsilon_cutoff": 0.002},
    "repetition": {"repetition_penalty": 1.4},
    "several": {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "normalized": {"renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [3, 5]},
}
SEVERAL = {"do_sample": True, **SAMPLED["several"]}


@pytest.fixture(scope="module")
def llama():
    model = quantized_decoder("llama", MXQuantizer.from_recipe("mxfp4_weight_only"))
    model.tokenizer = tokenizer_of_bytes()
    return model


@pytest.fixture(params=[0, 1], ids=["at once", "a step behind"])
def behind(request, monkeypatch):
    monkeypatch.setitem(step.BEHIND, "cpu", request.param)
    return request.param


@pytest.fixture
def compare(monkeypatch):
    """Generate with steps and with transformers' loop: the results, the streams, and the state of random numbers."""
    calls = []
    original = language_model.choose_tokens
    monkeypatch.setattr(language_model, "choose_tokens", lambda *arguments: calls.append(1) or original(*arguments))

    def run(model, ids, criteria=lambda: None, **options):
        results = []
        calls.clear()
        for by_steps in (True, False):
            with monkeypatch.context() as patch:
                if not by_steps:
                    patch.setattr(LanguageModel, "_covers", lambda *arguments: False)
                torch.manual_seed(4)
                streamer, given = Recorder(), {k: copy.deepcopy(v) for k, v in options.items()}
                result = model.generate(ids, streamer=streamer, stopping_criteria=criteria(), **given)
                results.append((result, streamer.put_tokens, torch.get_rng_state()))
            assert len(calls) == 1  # the steps were taken, and then they were not
        (ours, our_stream, our_state), (theirs, their_stream, their_state) = results
        assert our_stream == their_stream
        assert torch.equal(our_state, their_state)
        assert torch.equal(getattr(ours, "sequences", ours), getattr(theirs, "sequences", theirs))
        return ours, theirs

    return run


class Recorder(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.put_tokens = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.put_tokens.append(value.tolist())

    def end(self):
        self.put_tokens.append("end")


def ends(model, ids, mask, number, **options):
    """Tokens that end texts at different steps, and not all of them at the first one."""
    torch.manual_seed(4)
    new = model.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=None, **options)[:, ids.shape[1] :]
    return [int(new[row, 3 * row + 1]) for row in range(number)]


@pytest.mark.diagonal
@pytest.mark.parametrize("options", [{"do_sample": False}, SEVERAL], ids=["greedy", "sampled"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_ends_at_different_steps(llama, behind, compare, options, number):
    ids, mask = padded()
    end = ends(llama, ids, mask, number, **options) or None
    result, _ = compare(
        llama, ids, attention_mask=mask, max_new_tokens=12, eos_token_id=end, pad_token_id=299, **options
    )
    padding = (result[:, ids.shape[1] :] == 299).sum(1)
    assert (padding > 0).any() == (number > 0) and result.shape[1] <= 24


@pytest.mark.compiled_except("at once-*-3", "a step behind-several-1", "a step behind-repetition-3")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_text(llama, behind, compare, name, batch):
    ids, mask = padded(batch)
    compare(llama, ids, attention_mask=mask, max_new_tokens=10, do_sample=True, **SAMPLED[name])


def test_greedy_text_with_a_minimum_length(llama, behind, compare):
    ids, mask = padded()
    end = ends(llama, ids, mask, 3, do_sample=False)
    for least in ({"min_new_tokens": 6}, {"min_length": 17}):
        call = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "repetition_penalty": 1.1, **least}
        compare(llama, ids, attention_mask=mask, **call)


@pytest.mark.compiled
@pytest.mark.slow_except("*mistral")
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_sliding_windows(behind, compare, family):
    model, program = exported_decoder(family)
    ids, mask = padded()
    loaded = LanguageModel(program, model.config)
    result, _ = compare(loaded, ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(
        result, model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    )


@pytest.mark.slow_except("at once-sampled")
@pytest.mark.parametrize("options", [{"do_sample": False}, SEVERAL], ids=["greedy", "sampled"])
def test_a_quantized_cache(behind, compare, options):
    model = quantized_decoder("llama", MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8"))
    ids, mask = padded()
    compare(model, ids, attention_mask=mask, max_new_tokens=12, num_return_sequences=1, **options)


def test_several_sequences_of_a_prompt(llama, behind, compare):
    ids, mask = padded()
    result, _ = compare(llama, ids, attention_mask=mask, max_new_tokens=8, do_sample=True, num_return_sequences=2)
    assert len(result) == 6


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_and_the_cache(llama, behind, compare, batch):
    ids, mask = padded(batch)
    end = ends(llama, ids, mask, batch, **SEVERAL)
    records = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    ours, theirs = compare(
        llama, ids, attention_mask=mask, max_new_tokens=12, eos_token_id=end, pad_token_id=0, **records, **SEVERAL
    )
    assert type(ours) is type(theirs) and ours.attentions is ours.hidden_states is None
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name]) < 12
        assert all(map(torch.equal, ours[name], theirs[name]))
    cache, expected = ours.past_key_values, theirs.past_key_values
    assert cache.length == expected.length == ours.sequences.shape[1] - 1
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(layer.keys[:, :, : cache.length], other.keys[:, :, : cache.length])
    alone = llama.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert alone.scores is None and alone.logits is None


def test_a_text_goes_on_with_its_cache(llama, behind, compare):
    ids, options = torch.randint(256, (1, 12)), {"do_sample": False, "eos_token_id": None}
    first = llama.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **options)
    result, _ = compare(llama, first.sequences, past_key_values=first.past_key_values, max_new_tokens=6, **options)
    assert torch.equal(result, llama.generate(ids, max_new_tokens=11, **options))


class Last(transformers.StoppingCriteria):
    """End a sequence with a token that an even number divides; count the calls, and keep the scores."""

    def __init__(self):
        self.calls, self.scores = [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        self.scores.append(None if scores is None else len(scores))
        return input_ids[:, -1] % 8 == 0


@pytest.mark.diagonal
@pytest.mark.parametrize("end", [None, 299])
@pytest.mark.parametrize("batch", [1, 3])
def test_criteria_of_the_user(llama, behind, compare, batch, end):
    ids, mask = padded(batch)
    made = []

    def criteria():
        made.append(Last())
        return transformers.StoppingCriteriaList([made[-1]])

    records = dict.fromkeys(("return_dict_in_generate", "output_scores"), True)
    options = {"max_new_tokens": 30, "eos_token_id": end, "pad_token_id": 298, **records, **SEVERAL}
    ours, theirs = compare(llama, ids, criteria, attention_mask=mask, **options)
    assert all(map(torch.equal, ours.scores, theirs.scores)) and len(ours.scores) == len(theirs.scores)
    first, second = made
    assert first.calls == second.calls and first.scores == second.scores and 1 < len(first.calls) < 30


@pytest.mark.parametrize("batch", [1, 3])
def test_stop_strings(llama, behind, compare, batch):
    ids, mask = padded(batch)
    new = llama.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)[:, 12:]
    stops = [llama.tokenizer.decode([int(token)]) for token in new[:, 4] if token < 256]
    result, _ = compare(
        llama, ids, attention_mask=mask, max_new_tokens=8, do_sample=False, stop_strings=stops, eos_token_id=None
    )
    assert stops and result.shape[1] <= 20


def test_a_maximum_time(llama, behind, monkeypatch):
    now, ids = [0.0], torch.randint(256, (2, 12))
    monkeypatch.setattr(time, "time", lambda: now[0])

    class Clock(Recorder):
        def put(self, value):
            super().put(value)
            now[0] += 1

    streamer = Clock()
    options = {"do_sample": True, "eos_token_id": None, "max_new_tokens": 20}
    result = llama.generate(ids, max_time=3.5, streamer=streamer, **options)
    assert result.shape == (2, 17) and len(streamer.put_tokens) == 7  # time begins after the prompt


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"max_new_tokens": 1},
        {"logits_processor": transformers.LogitsProcessorList([transformers.TopHLogitsWarper(0.5)])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_step_does_not_cover(llama, monkeypatch, options):
    monkeypatch.setattr(language_model, "choose_tokens", None)
    ids = torch.randint(256, (1, 12))
    result = llama.generate(ids, **{"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, **options})
    assert getattr(result, "sequences", result).shape == (1, 12 + options.get("max_new_tokens", 4))


@pytest.mark.compiled
def test_recurrent_layers_are_not_covered(monkeypatch):
    model, program = exported_decoder("lfm2")
    monkeypatch.setattr(language_model, "choose_tokens", None)
    ids = torch.randint(256, (1, 12))
    assert LanguageModel(program, model.config).generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 16)


def test_a_text_that_fills_its_cache(llama, behind, compare):
    ids = torch.randint(256, (1, 245))
    for longest in (256, 257):
        result, _ = compare(llama, ids, max_length=longest, do_sample=False, eos_token_id=None)
        assert result.shape == (1, longest)


class Raises(transformers.generation.streamers.BaseStreamer, transformers.StoppingCriteria):
    """Raise an exception after four calls."""

    def __init__(self, error):
        self.calls, self.error = 0, error

    def put(self, value):
        self.calls += 1
        if self.calls == 5:
            raise self.error

    def __call__(self, input_ids, scores, **kwargs):
        self.put(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def end(self):
        raise AssertionError("an interrupted stream has no end")


@pytest.mark.diagonal
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["streamer", "criterion"])
@pytest.mark.parametrize("batch", [1, 3])
def test_after_an_exception(llama, behind, monkeypatch, error, kind, batch):
    """The cache holds what was read, and random numbers go on, as after transformers' loop."""
    ids, mask = padded(batch)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": True, "eos_token_id": None}
    torch.manual_seed(4)
    expected = llama.generate(ids, **options)
    states = []
    for by_steps in (True, False):
        cache, raises = llama.new_cache(batch, 40), Raises(error)
        given = {"streamer": raises} if kind == "streamer" else {"stopping_criteria": [raises]}
        torch.manual_seed(4)
        with monkeypatch.context() as patch, pytest.raises(error):
            if not by_steps:
                patch.setattr(LanguageModel, "_covers", lambda *arguments: False)
            llama.generate(ids, past_key_values=cache, **given, **options)
        states.append((cache.length, torch.get_rng_state()))
    (length, random), (their_length, their_random) = states
    assert length == their_length == (15 if kind == "streamer" else 16) and torch.equal(random, their_random)
    torch.manual_seed(4)
    assert torch.equal(llama.generate(ids, **options), expected)


def test_a_default_device(llama, behind, compare):
    ids, mask = padded()
    with torch.device("meta"):  # of tensors that name no device
        result, _ = compare(llama, ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert result.device.type == "cpu"


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
