import copy
import pickle
import weakref
from unittest import mock

import pytest
import torch

from pt2mx import LanguageModel, MXQuantizer
from pt2mx.kernels.inductor import record
from pt2mx.pt2e.language import language_model
from pt2mx.pt2e.language.cache import DecoderCache
from pt2mx.pt2e.language.sampling import Choice, processors_of
from pt2mx.pt2e.language.step import Step, _advance, _argmax
from tests.language_models import padded, quantized_decoder, transformers

GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}


@pytest.fixture
def llama():
    return quantized_decoder("llama", MXQuantizer.from_recipe("mxfp4_weight_only"))


@pytest.fixture
def kept(llama, monkeypatch):
    """A model that keeps its step, as on a GPU, where the step is a CUDA graph."""
    monkeypatch.setattr(Step, "is_captured", True)
    return llama


def step_of(model, batch=2, choice=None):
    cache, slots = model.new_cache(batch, 8), 256
    token = torch.zeros(batch, 1, dtype=torch.long)
    inputs = {"input_ids": token, "position_ids": token + 3}
    mask = torch.ones(batch, slots, dtype=torch.long)
    cache.advance(3)
    return Step(model.runner, inputs, mask, cache, choice or Choice((), False, (), None), 300), inputs, mask


def test_a_step_writes_its_next_inputs(llama):
    step, inputs, mask = step_of(llama, choice=Choice((), False, (7,), 9))
    step.begin(inputs, mask, torch.zeros(2, 3, dtype=torch.long))
    logits = torch.zeros(2, 1, 300)
    logits[0, 0, 5] = logits[1, 0, 7] = 1.0
    step.choose(logits)
    step.send()
    tokens, unfinished = step.receive()
    assert tokens.tolist() == [5, 7] and unfinished.tolist() == [True, False]
    assert (step.start.item(), step.length.item()) == (3, 4)
    assert step._inputs["input_ids"].tolist() == [[5], [7]] and step._inputs["position_ids"].tolist() == [[3], [3]]
    addresses = [step._inputs["input_ids"].data_ptr(), step.start.data_ptr()]
    step.run()
    step.send()
    tokens, unfinished = step.receive()
    assert tokens[1] == 9 and unfinished.tolist() == [True, False]  # padding follows the end
    assert (step.start.item(), step.cache.length) == (4, 4) and step._inputs["position_ids"].tolist() == [[4], [4]]
    assert addresses == [step._inputs["input_ids"].data_ptr(), step.start.data_ptr()]
    assert inputs["input_ids"].tolist() == [[0], [0]]


def test_a_step_changes_no_mask_of_the_caller(llama):
    step, inputs, mask = step_of(llama)
    step.begin(inputs, 0 * mask, torch.zeros(2, 3, dtype=torch.long))  # of another call
    assert mask.all() and not step._mask.any()


def test_tokens_are_received_in_order(llama):
    step, inputs, mask = step_of(llama)
    step.begin(inputs, mask, torch.zeros(2, 3, dtype=torch.long))
    for token in (1, 2):
        logits = torch.zeros(2, 1, 300)
        logits[..., token] = 1.0
        step.choose(logits)
        step.send()
    assert [step.receive()[0].tolist() for _ in range(2)] == [[1, 1], [2, 2]]
    step.send()
    step.begin(inputs, mask, torch.zeros(2, 3, dtype=torch.long))  # what was sent is forgotten
    step.choose(logits)
    step.send()
    assert step.receive()[0].tolist() == [2, 2]


def test_a_step_is_taken_back(llama):
    """As before a CUDA graph is recorded."""
    choice = Choice(processors_of([transformers.RepetitionPenaltyLogitsProcessor(1.5)]), True, (7,), 9)
    step, inputs, mask = step_of(llama, choice=choice)
    tokens = torch.tensor([[4, 5, 6], [1, 2, 3]])
    results = []
    for tries in (0, 2):
        torch.manual_seed(3)
        step.begin(inputs, mask, tokens)
        step.choose(torch.zeros(2, 1, 300))
        for _ in range(tries):
            step._try()
        step.run()
        step.send()
        results.append([*step.receive(), step.seen.clone(), step.start.clone(), torch.get_rng_state()])
        step.cache.advance(-1)
    assert all(map(torch.equal, *results))
    assert results[0][2].sum(1).tolist() == [5, 5]  # three tokens of the prompt, and two others


@pytest.mark.parametrize("length", [1, 300, 1024])
def test_the_largest_of_parts(length):
    rows = torch.randint(3, (6, length)).float()  # many equals
    rows[1], rows[2, -1], rows[3, length // 2] = -torch.inf, torch.inf, torch.nan
    for parts in (1, 8):
        assert torch.equal(_argmax(rows, parts), rows.argmax(-1))
        assert torch.equal(_argmax(rows.bfloat16(), parts), rows.argmax(-1))


@pytest.mark.compiled
@pytest.mark.parametrize("pad", [None, torch.tensor(9)])
def test_the_state_is_advanced_by_compiled_code(compiler, pad):
    states = []
    for advance in (torch.compile(_advance), _advance):
        weights = torch.zeros(3, 300)
        weights[0, 4] = weights[1, 7] = weights[2, 5] = 1.0
        unfinished, seen, counters = (
            torch.tensor([True, True, False]),
            torch.zeros(3, 300).bool(),
            [torch.ones(1).long()],
        )
        token, result = torch.zeros(3, 1, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
        advance(weights, 16, unfinished, torch.tensor([7, 8]), pad, seen, token, counters, result)
        states.append([unfinished, seen, token, *counters, result])
    assert all(map(torch.equal, *states))
    last = 5 if pad is None else 9
    assert result.tolist() == [[4, 7, last], [1, 0, 0]] and token.flatten().tolist() == [4, 7, last]
    assert seen.nonzero().tolist() == [[0, 4], [1, 7], [2, last]] and counters[0].item() == 2


def test_which_calls_a_step_fits(llama):
    step, inputs, _ = step_of(llama)
    choice = step.choice
    assert step.fits(llama.runner, inputs, step.cache, Choice((), False, (), None))
    assert not step.fits(llama.runner, inputs, llama.new_cache(2, 8), choice)
    assert not step.fits(llama.runner, inputs, step.cache, Choice((), True, (), None))
    assert not step.fits(llama.runner, {**inputs, "image_rows": inputs["input_ids"]}, step.cache, choice)
    other = LanguageModel(llama.program, llama.config)
    assert not step.fits(other.runner, inputs, step.cache, choice)


@pytest.mark.slow_except("options0")
@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "do_sample": True, "repetition_penalty": 1.3}])
def test_a_second_call_takes_the_step_and_its_cache(kept, options):
    ids, mask = padded()
    torch.manual_seed(2)
    first = kept.generate(ids, attention_mask=mask, **options)
    step, addresses = kept._step, [layer.keys.data_ptr() for layer in kept._step.cache.layers]
    other = kept.generate(ids.flip(0), attention_mask=mask.flip(0), **options)
    torch.manual_seed(2)
    assert torch.equal(kept.generate(ids, attention_mask=mask, **options), first) and not torch.equal(first, other)
    assert kept._step is step and [layer.keys.data_ptr() for layer in step.cache.layers] == addresses
    assert len({layer.keys.data_ptr() for layer in step.cache.layers}) == 2


@pytest.mark.compiled
def test_a_step_is_replaced(kept):
    ids, mask = padded()
    expected = kept.generate(ids, attention_mask=mask, **GREEDY)
    steps = [kept._step]
    for call in ({"max_new_tokens": 300}, {"do_sample": True}, {"eos_token_id": 299, "pad_token_id": 298}):
        kept.generate(ids, attention_mask=mask, **{**GREEDY, **call})
        assert kept._step is not steps[-1]
        steps.append(kept._step)
    kept.generate(ids, attention_mask=mask, **{**GREEDY, "num_beams": 2})
    assert kept._step is None  # no second cache next to that of the beams
    assert torch.equal(kept.generate(ids, attention_mask=mask, **GREEDY), expected)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("compiles", [True, False])
def test_the_cache_of_a_step_is_freed_before_there_is_another(kept, monkeypatch, compiles):
    """Without the garbage collector."""
    kept.runner.compiles = compiles  # a recorded program is part of the step
    kept.generate(padded()[0], **GREEDY)
    first, alive, new_cache = weakref.ref(kept._step.cache), [], LanguageModel.new_cache
    monkeypatch.setattr(LanguageModel, "new_cache", lambda *sizes: alive.append(first()) or new_cache(*sizes))
    kept.generate(padded(2)[0], **GREEDY)
    assert alive == [None]


@pytest.mark.compiled
def test_a_cache_that_the_user_has_is_not_taken(kept):
    ids = padded()[0]
    result = kept.generate(ids, return_dict_in_generate=True, **GREEDY)
    cache, values = result.past_key_values, result.past_key_values.layers[0].values.clone()
    step = kept._step
    kept.generate(ids.flip(0), **GREEDY)
    assert kept._step is not step and kept._step.cache is not cache
    assert torch.equal(cache.layers[0].values, values)
    more = kept.generate(result.sequences, past_key_values=cache, **GREEDY)
    assert kept._step.cache is cache and not kept._step.cache_is_free
    assert torch.equal(more, kept.generate(result.sequences, **GREEDY))


@pytest.mark.compiled
def test_a_step_is_freed_for_the_cache_of_a_user(kept, monkeypatch):
    """Also while a cache grows: its tensors are freed one after the other."""
    ids, steps, grow = padded()[0], [], DecoderCache.grow
    monkeypatch.setattr(DecoderCache, "grow", lambda *sizes: steps.append(kept._step) or grow(*sizes))
    kept.generate(ids, **GREEDY)
    cache = kept.new_cache(3, 8)
    expected = kept.generate(ids, **GREEDY)
    assert torch.equal(kept.generate(ids, past_key_values=cache, **GREEDY), expected)
    assert kept._step.cache is cache
    kept.generate(expected, past_key_values=cache, **{**GREEDY, "max_new_tokens": 300})
    assert kept._step.cache is cache and steps == [None]


@pytest.mark.compiled
def test_no_step_is_kept_on_the_cpu(llama):
    llama.generate(padded()[0], **GREEDY)
    assert llama._step is None


@pytest.mark.compiled
def test_a_compiled_step_is_recorded_on_the_cpu():
    """Tokens are those of the program; a second call needs no record, another number of threads does."""
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    model = quantized_decoder("llama", quantizer, dtype="bfloat16", head_dim=32)
    (ids, mask), original = padded(), record.record
    options = {**GREEDY, "attention_mask": mask, "max_new_tokens": 16}
    model.compile()
    with mock.patch.object(record, "record", lambda program: (program(), None)):
        expected = model.generate(ids, **options)
    assert model._step is None
    for records in (1, 0, 1):
        with mock.patch.object(record, "record", side_effect=original) as recorded:
            result = model.generate(ids, **options)
        assert torch.equal(result, expected) and recorded.call_count == records and model._step.is_captured
        if not records:
            torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_num_threads(torch.get_num_threads() - 1)


@pytest.mark.compiled
@pytest.mark.slow_except("True")
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode(kept, first):
    """Tensors of inference mode cannot change outside of it."""
    ids, mask = padded()
    results = []
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            results.append(kept.generate(ids, attention_mask=mask, **GREEDY).clone())
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.slow_except("deepcopy")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_step(kept, copied):
    ids = padded()[0]
    expected = kept.generate(ids, **GREEDY)
    kept._step.graph = (one for one in ())  # like a CUDA graph, nothing copies a generator
    other = copied(kept)
    assert other._step is None and kept._step is not None
    assert torch.equal(other.generate(ids, **GREEDY), expected)


@pytest.mark.compiled
def test_the_gpu_of_the_model_is_the_current_one(llama, monkeypatch):
    devices, original, choose = [], torch.cuda.device_of, language_model.choose_tokens

    class Current(original):
        def __enter__(self):
            devices.append("enter")

        def __exit__(self, *error):
            devices.append("exit")

    monkeypatch.setattr(torch.cuda, "device_of", Current)
    monkeypatch.setattr(language_model, "choose_tokens", lambda *args: devices.append("choose") or choose(*args))
    llama.generate(padded()[0], **GREEDY)
    first, last = devices.index("choose"), len(devices) - 1
    assert devices[:first].count("enter") == 1 and devices[last] == "exit" and devices.count("exit") == 1
