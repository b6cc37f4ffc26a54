"""RoPE whose frequencies depend on the length of the text: a program has those for one length."""

import copy

import pytest
import torch

from pt2mx import LanguageModel, MXError
from pt2mx.pt2e.language.arguments import LONGEST_TEXT
from pt2mx.pt2e.language.decoder import export_decoder
from pt2mx.pt2e.language.rope import longest_text
from tests.language_models import tiny_decoder

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [4.0, 3.0] * 4,
    "short_factor": [1.0] * 8,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def language_model(model, length):
    config = copy.deepcopy(model.config)
    setattr(config, LONGEST_TEXT, longest_text(model, length))
    return LanguageModel(export_decoder(model, length), config)


def longrope():
    """Return a model with short factors for texts of up to 32 tokens."""
    fields = {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE, "initializer_range": 0.2}
    return tiny_decoder("phi3", num_hidden_layers=1, **fields)


@pytest.mark.compiled
@pytest.mark.slow_except("64-40")
@pytest.mark.parametrize(("length", "prompt"), [(None, 12), (64, 40)])
def test_longrope(length, prompt):
    """The text is that of transformers where all of it is below the limit of the short factors, or above."""
    model, ids = longrope(), torch.randint(256, (2, prompt))
    result = language_model(model, length)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(result.generate(ids, **options), model.generate(ids, **options))
    longest = length or 32
    room = longest + 1 - prompt
    with pytest.raises(
        MXError, match=f"{longest} positions: give max_new_tokens={room} or .* --text-length {prompt + 99}"
    ):
        result.generate(ids, **{**options, "max_new_tokens": 100})
    assert result.generate(ids, **{**options, "max_new_tokens": room}).shape[1] == longest + 1
    with pytest.raises(MXError, match=f"text of {longest + 1} tokens is longer than {longest}"):
        result(torch.zeros(1, longest + 1, dtype=torch.long))


@pytest.mark.slow_except("100")
@torch.no_grad()
@pytest.mark.parametrize("length", [None, 100])
def test_dynamic_frequencies(length):
    """The logits are those of transformers for texts of the length, and for those below the model's own limit, 64."""
    fields = {"num_hidden_layers": 1, "max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    model, ids = tiny_decoder("llama", **fields), torch.randint(256, (2, length or 50))
    result = language_model(model, length)
    assert torch.allclose(result(ids).logits, tiny_decoder("llama", **fields)(ids).logits, atol=2e-6)


@pytest.mark.compiled
def test_the_export_does_not_change_the_frequencies():
    model, ids = longrope(), torch.randint(256, (1, 12))
    with torch.no_grad():
        export_decoder(model, 64)
        assert torch.equal(model(ids).logits, longrope()(ids).logits)


def test_only_some_layers(capfd):
    """The error is one line with the reason and an alternative, without torch's log."""
    parameters = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    model = tiny_decoder("gemma3", layer_types=["sliding_attention", "full_attention"], rope_parameters=parameters)
    with pytest.raises(MXError) as caught:
        export_decoder(model)
    text = str(caught.value)
    assert "Gemma3ForCausalLM has RoPE of the type 'dynamic' in some of its layers: its frequencies depend on" in text
    assert "by `pt2mx convert-checkpoint`, or by PT2MXConfig" in text and "\n" not in text
    assert capfd.readouterr().err.count("\n") <= 1
    with pytest.raises(MXError, match="a text length of 0 must be at least 1"):
        longest_text(model, 0)
