"""`HarnessModel` without lm-eval: a stand-in has the base class. tests/pt2e/cli/test_eval.py has lm-eval itself."""

import copy
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import processors

from pt2mx import MXError
from pt2mx.pt2e.language.scoring import continuations, log_likelihoods
from tests.language_models import decoder_by_recipe, tokenizer_of_bytes

HARNESS = "pt2mx.pt2e.language.harness"


@pytest.fixture
def harness(monkeypatch):
    """The module, imported with a stand-in for lm-eval."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        module = ModuleType(name)
        module.__spec__, module.__path__, module.TemplateLM = ModuleSpec(name, None), [], object
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    yield importlib.import_module(HARNESS)
    del sys.modules[HARNESS]


@pytest.fixture
def model():
    quantized = copy.copy(decoder_by_recipe("mxfp4_weight_only", "llama"))
    quantized.tokenizer = tokenizer_of_bytes()
    return quantized


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


def test_scores_are_those_of_the_end_of_a_long_text(harness, model):
    wrapped = harness.HarnessModel(model, batch_size=2, max_length=6)
    long, answer = list(range(20)), [5, 6, 7]
    results = wrapped._loglikelihood_tokens([(None, long, answer), (None, [1, 2], answer), (None, long, [9])])
    read = [(long[-4:], answer), ([1, 2], answer), (long[-6:], [9])]
    assert results == [pytest.approx(one) for one in log_likelihoods(model, read)]
    with pytest.raises(MXError, match="7 tokens do not fit into the 6 tokens that the model reads"):
        wrapped._loglikelihood_tokens([(None, [1], list(range(8)))])


def test_a_text_is_scored_in_windows(harness, model):
    wrapped = harness.HarnessModel(model, batch_size=4, max_length=4)
    results = wrapped.loglikelihood_rolling(requests(("abcdefghij",), ("",), ("ab",)))
    text = wrapped.tok_encode("abcdefghij")
    windows = [([256], text[:4]), (text[3:4], text[4:8]), (text[5:8], text[8:])]
    parts = [value for value, _ in log_likelihoods(model, [*windows, ([256], text[:2])])]
    assert results == pytest.approx([sum(parts[:3]), 0, parts[3]])


def test_tasks_say_how_to_generate(harness, model):
    wrapped = harness.HarnessModel(model, batch_size=2, max_length=20)
    prompts = ["Hello", "a prompt of more than fifteen tokens", ""]
    tokens = [wrapped.tok_encode(prompts[0]), wrapped.tok_encode(prompts[1])[-14:], [256]]
    expected = continuations(model, tokens, length=6)
    stop = expected[1][-1]
    given = [{"until": [], "max_gen_toks": 6}, {"until": stop, "max_new_tokens": 6}, {"max_gen_toks": 6, "until": []}]
    results = wrapped.generate_until(requests(*zip(prompts, given, strict=True)))
    assert results == [expected[0], expected[1].partition(stop)[0], expected[2]]
    with pytest.raises(MXError, match="256 tokens do not fit"):
        wrapped.generate_until(requests(("Hello", {})))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"temperature": 0.0, "top_p": 0.9}, {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
    ],
)
def test_options_of_sampling(harness, given, options):
    assert harness._generate_options(given) == ([], 256, options)
    more = {"until": ["", "a"], "max_completion_tokens": 3}
    assert harness._generate_options({**given, **more}) == (["a"], 3, options)


def test_sampled_text_follows_the_seed(harness, model):
    wrapped = harness.HarnessModel(model, max_length=40)
    request = requests(("Hello", {"do_sample": True, "temperature": 5.0, "max_gen_toks": 8}))
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts += wrapped.generate_until(request)
    assert texts[0] == texts[1] != texts[2]


def test_the_first_token_is_not_written_twice(harness, model):
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    model.tokenizer.backend_tokenizer.post_processor = begins
    wrapped = harness.HarnessModel(model)
    letter = model.tokenizer.convert_tokens_to_ids("a")
    assert wrapped.tok_encode("a") == wrapped.tok_encode("<s>a") == [256, letter]
    assert wrapped.tok_encode("a", add_special_tokens=False) == [letter] and wrapped.tok_encode("") == [256]
    assert (wrapped.prefix_token_id, wrapped.eot_token_id) == (256, 257)
    model.tokenizer.bos_token = None
    assert wrapped.prefix_token_id == 257


def test_chat_template(harness, model):
    wrapped, messages = harness.HarnessModel(model), [{"role": "user", "content": "Hello"}]
    with pytest.raises(MXError, match="no chat template"):
        wrapped.apply_chat_template(messages)
    model.tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert wrapped.apply_chat_template(messages) == "<user>Hello<assistant>"
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    assert wrapped.apply_chat_template(begun, add_generation_prompt=False) == "<user>Hello<assistant>It is"


@pytest.mark.parametrize(("option", "value"), [("batch_size", 0), ("max_length", -1)])
def test_numbers_below_one(harness, model, option, value):
    with pytest.raises(MXError, match=f"{option}={value} must be at least 1"):
        harness.HarnessModel(model, **{option: value})


def test_models_that_continue_no_text(harness, model):
    model.tokenizer = None
    with pytest.raises(MXError, match="the model has no tokenizer"):
        harness.HarnessModel(model)
    model.tokenizer, model.config = tokenizer_of_bytes(), SimpleNamespace(is_encoder_decoder=True, model_type="t5")
    with pytest.raises(MXError, match="a t5 answers a text"):
        harness.HarnessModel(model)
