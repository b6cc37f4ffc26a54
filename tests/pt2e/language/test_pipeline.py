"""A `LanguageModel` in a text-generation pipeline of transformers."""

import pytest

from pt2mx import MXQuantizer
from tests.language_models import quantized_decoder, tokenizer_of_bytes, transformers

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    model = quantized_decoder("llama", MXQuantizer.from_recipe("mxfp8"))
    model.tokenizer = tokenizer_of_bytes()
    return model


@pytest.fixture(scope="module")
def pipe(model):
    return transformers.pipeline("text-generation", model=model, tokenizer=model.tokenizer, device=model.device)


def test_a_prompt(pipe, model):
    expected = model.generate(text="Hello", **OPTIONS)
    assert pipe("Hello", **OPTIONS) == [{"generated_text": "Hello" + expected}]
    assert pipe("Hello", return_full_text=False, **OPTIONS) == [{"generated_text": expected}]


def test_a_batch_of_prompts_and_a_chat(pipe, model):
    prompts = ["Hello", "A longer prompt"]
    model.tokenizer.pad_token = model.tokenizer.eos_token
    answers = pipe(prompts, batch_size=2, return_full_text=False, **OPTIONS)
    assert [answer["generated_text"] for (answer,) in answers] == model.generate(text=prompts, **OPTIONS)
    model.tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (answer,) = pipe([{"role": "user", "content": "Hello"}], **OPTIONS)
    expected = model.generate(text="<user>Hello", **OPTIONS)
    assert answer["generated_text"][-1] == {"role": "assistant", "content": expected}


def test_sampling_has_the_random_numbers_of_generate(pipe, model):
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 2.0}
    transformers.set_seed(3)
    expected = model.generate(text="Hello", **options)
    transformers.set_seed(3)
    assert pipe("Hello", return_full_text=False, **options) == [{"generated_text": expected}]
    with pytest.raises(ValueError, match=r"top_p=1\.5 must be a number from 0 to 1"):
        pipe("Hello", **options, top_p=1.5)
