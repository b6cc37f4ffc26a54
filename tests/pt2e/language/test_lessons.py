"""Text that a language model writes, to train its quantized form on."""

import pytest
import torch
import transformers

from pt2mx import MXError, generate_lessons

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def decoder(**config):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, vocab_size=64, bos_token_id=1, initializer_range=0.3, **config)
    return transformers.LlamaForCausalLM(config).eval()


def test_each_begins_as_its_text_and_is_as_long():
    texts = [torch.randint(64, shape) for shape in ((2, 24), (1, 24), (1, 12), (3, 20), (1, 6))]
    written = generate_lessons(decoder(eos_token_id=2), texts, prompt=8, at_once=2)
    assert [lesson.shape for lesson in written] == [text.shape for text in texts]
    for lesson, text in zip(written, texts, strict=True):
        assert torch.equal(lesson[:, :8], text[:, :8])
    assert not any(torch.equal(*pair) for pair in zip(written[:4], texts[:4], strict=True))
    assert torch.equal(written[4], texts[4])


def test_the_seed_alone_decides():
    model, texts = decoder(eos_token_id=None), [torch.randint(64, (4, 40))]
    state = torch.get_rng_state()
    first, again, other = (generate_lessons(model, texts, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


SETTINGS = [
    {"do_sample": False, "top_k": 1, "top_p": 0.1, "temperature": 0.1},
    {"min_p": 0.9, "typical_p": 0.1, "epsilon_cutoff": 0.5, "suppress_tokens": list(range(60))},
    {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True, "max_time": 0.001, "max_length": 3},
    {"stop_strings": ["a"], "prompt_lookup_num_tokens": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_tokens_have_the_probabilities_of_the_model(settings):
    """Whatever the model's own settings are."""
    model = decoder(eos_token_id=None)
    model.generation_config.update(**settings)
    config = model.generation_config.to_dict()
    prompt = torch.tensor([[5, 9, 3, 0]])
    (written,) = generate_lessons(model, [prompt.expand(4000, 4)], prompt=3, at_once=4000)
    with torch.no_grad():
        expected = model(prompt[:, :3]).logits[0, -1].softmax(0)
    frequencies = written[:, 3].bincount(minlength=64) / 4000
    assert (frequencies - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5
    assert (frequencies > 0).sum() > 20
    assert model.generation_config.to_dict() == config


def test_dropout_is_off_while_it_writes():
    model, texts = decoder(eos_token_id=None, attention_dropout=0.9), [torch.randint(64, (4, 40))]
    (expected,) = generate_lessons(model, texts)
    model.train().lm_head.eval()
    (written,) = generate_lessons(model, texts)
    assert torch.equal(written, expected)
    assert model.model.layers[0].self_attn.training and not model.lm_head.training


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"prompt": 0}, "prompt=0 must be an integer of at least 1"),
        ({"at_once": 2.0}, "at_once=2.0 must be an integer of at least 1"),
        ({"seed": None}, "seed=None must be an integer"),
        ({"texts": [{"input_ids": torch.zeros(1, 20, dtype=torch.long)}]}, "texts must be tokens, .* each, without"),
        ({"texts": [torch.full((1, 20), 64)]}, "texts hold tokens from 64 to 64: the model has 64"),
        ({"texts": torch.zeros(1, 20)}, "texts must be a list of tokens"),
        ({"model": torch.nn.Linear(2, 2)}, "expected a language model of transformers, not Linear"),
    ],
)
def test_bad_input(arguments, told):
    arguments = {"model": decoder(), "texts": [torch.zeros(1, 20, dtype=torch.long)], **arguments}
    with pytest.raises(MXError, match=told):
        generate_lessons(**arguments)


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=64)
    with pytest.raises(MXError, match="T5ForConditionalGeneration is no decoder of text"):
        generate_lessons(transformers.T5ForConditionalGeneration(config), [torch.zeros(1, 20, dtype=torch.long)])
