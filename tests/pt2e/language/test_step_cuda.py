"""Steps of `generate` as CUDA graphs."""

import pytest
import torch

from pt2mx import LanguageModel, MXQuantizer
from pt2mx.pt2e.language.sampling import Choice
from pt2mx.pt2e.language.step import Step
from tests.language_models import padded, quantized_decoder, transformers

pytestmark = pytest.mark.cuda

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
MODES = {"greedy": GREEDY, "sampled": {**GREEDY, **SAMPLED}}
PROCESSED = {"typical_p": 0.7, "epsilon_cutoff": 0.001, "renormalize_logits": True, "remove_invalid_values": True}


@pytest.fixture(scope="module", params=[None, "mxfp8"], ids=["float cache", "FP8 cache"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache(request.param)
    quantized_decoder("llama", quantizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["eager", "compiled", "reduce-overhead", "packages"])
def model(request, folder):
    model = LanguageModel.from_pretrained(folder, "cuda")
    if request.param == "packages":
        model.write_packages(folder)
        yield LanguageModel.from_pretrained(folder, "cuda")
        for package in folder.glob("*.aoti.pt2"):
            package.unlink()
        return
    torch._dynamo.reset()
    if request.param != "eager":
        model.compile(**({} if request.param == "compiled" else {"mode": request.param}))
    yield model


def prompts(batch=3):
    ids, mask = padded(batch)
    return ids.cuda(), mask.cuda()


def by_transformers(model, monkeypatch, ids, seed=3, **options):
    """Generate with transformers' loop."""
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "_covers", lambda *arguments: False)
        torch.manual_seed(seed)
        return model.generate(ids, **options)


def by_steps(model, ids, seed=3, **options):
    torch.manual_seed(seed)
    return model.generate(ids, **options)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_a_graph(model, monkeypatch, mode):
    for batch in (3, 1):
        ids, mask = prompts(batch)
        options = {"attention_mask": mask, **MODES[mode]}
        expected = by_transformers(model, monkeypatch, ids, **options)
        state = torch.cuda.get_rng_state()
        for _ in range(10):
            assert torch.equal(by_steps(model, ids, **options), expected)
            assert torch.equal(torch.cuda.get_rng_state(), state)
        assert model._step.is_captured
        other = ids.flip(1)
        expected = by_transformers(model, monkeypatch, other, **MODES[mode])
        assert torch.equal(by_steps(model, other, **MODES[mode]), expected)


@pytest.mark.parametrize("name", [*SAMPLED, *PROCESSED])
def test_logits_processors(model, monkeypatch, name):
    ids, mask = prompts()
    options = {**GREEDY, "do_sample": True, "attention_mask": mask, name: {**SAMPLED, **PROCESSED}[name]}
    assert torch.equal(by_steps(model, ids, **options), by_transformers(model, monkeypatch, ids, **options))


def test_tokens_are_drawn_as_by_multinomial():
    choice = Choice((), True, (), None)
    scores = torch.randn(4, 128256, device="cuda") * 3
    torch.manual_seed(5)
    expected = [torch.multinomial(scores.softmax(-1), 1)[:, 0] for _ in range(20)]
    state = torch.cuda.get_rng_state()
    torch.manual_seed(5)
    assert all(torch.equal(choice.weights(scores).argmax(-1), one) for one in expected)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("mode", MODES)
def test_ends_scores_and_the_cache(model, monkeypatch, mode):
    ids, mask = prompts()
    new = by_steps(model, ids, attention_mask=mask, **MODES[mode])[:, 12:]
    ends = [int(new[row, 2 * row + 1]) for row in range(3)]
    records = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    options = {"attention_mask": mask, **MODES[mode], "eos_token_id": ends, "pad_token_id": 299, **records}
    ours = by_steps(model, ids, **options)
    state = torch.cuda.get_rng_state()
    theirs = by_transformers(model, monkeypatch, ids, **options)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(ours.sequences, theirs.sequences) and ours.sequences.shape[1] < 24
    assert len(ours.scores) == len(theirs.scores) and all(map(torch.equal, ours.scores, theirs.scores))
    assert len(ours.logits) == len(theirs.logits) and all(map(torch.equal, ours.logits, theirs.logits))
    assert ours.past_key_values.length == theirs.past_key_values.length == ours.sequences.shape[1] - 1


class Recorder(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.put_tokens = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.put_tokens.append(value.flatten().tolist())

    def end(self):
        self.put_tokens.append("end")


def test_a_streamer_is_one_step_behind(model, monkeypatch):
    ids, runs, behind = prompts(1)[0], [], []
    run = Step.run
    monkeypatch.setattr(Step, "run", lambda step: runs.append(1) or run(step))

    class Behind(Recorder):
        def put(self, value):
            super().put(value)
            behind.append(len(runs) + 1 - (len(self.put_tokens) - 1))  # tokens that were chosen but not put

    streamer = Behind()
    result = model.generate(ids, streamer=streamer, **GREEDY)
    assert behind == [1, *[1] * 11, 0]
    expected = Recorder()
    by_transformers(model, monkeypatch, ids, streamer=expected, **GREEDY)
    assert streamer.put_tokens == expected.put_tokens
    assert [one for (one,) in streamer.put_tokens[1:-1]] == result[0, 12:].tolist()


def test_no_step_waits_for_the_gpu(model, monkeypatch):
    ids, mask = prompts()
    run, send, replays = Step.run, Step.send, []

    def checked(call):
        def strict(step):
            if not step.is_captured:
                return call(step)
            torch.cuda.set_sync_debug_mode("error")
            try:
                replays.append(1)
                return call(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return strict

    monkeypatch.setattr(Step, "run", checked(run))
    monkeypatch.setattr(Step, "send", checked(send))
    for options in MODES.values():
        for _ in range(2):
            model.generate(ids, attention_mask=mask, **options)
    assert len(replays) >= 2 * 2 * 2 * 10


def test_a_second_call_takes_graph_and_cache(model):
    ids, mask = prompts()
    first = model.generate(ids, attention_mask=mask, **GREEDY)
    step, used = model._step, torch.cuda.memory_allocated()
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), first)
    assert model._step is step and torch.cuda.memory_allocated() <= used
    model.generate(ids[:1], **GREEDY)
    assert model._step is not step
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), first)


def test_a_text_goes_on_with_its_cache(model):
    ids = prompts(1)[0]
    whole = model.generate(ids, **{**GREEDY, "max_new_tokens": 24})
    first = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    more = model.generate(first.sequences, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(more, whole)


def test_criteria_of_the_user(model, monkeypatch):
    class Divides(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert input_ids.device.type == "cuda"
            return input_ids[:, -1] % 6 == 0

    for batch in (1, 3):
        ids, mask = prompts(batch)
        options = {**GREEDY, **SAMPLED, "max_new_tokens": 40, "eos_token_id": 299, "pad_token_id": 298}
        criteria = transformers.StoppingCriteriaList([Divides()])
        call = {"attention_mask": mask, "stopping_criteria": criteria, **options}
        ours = by_steps(model, ids, **call)
        state = torch.cuda.get_rng_state()
        assert torch.equal(ours, by_transformers(model, monkeypatch, ids, **call)) and ours.shape[1] < 52
        assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_step_that_waits_for_the_gpu_is_not_captured(folder, monkeypatch):
    model, (ids, mask) = LanguageModel.from_pretrained(folder, "cuda"), prompts()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    step = model.runner.step_of(3)

    def waits(**inputs):
        assert int(inputs["start"]) >= 12
        return step(**inputs)

    monkeypatch.setattr(model.runner, "step_of", lambda batch: waits)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    assert model._step is None
    assert torch.cuda.get_sync_debug_mode() == 0
