import math

import pytest
import torch

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.language.arguments import RANGES, check_outputs, check_sampling, fault_of
from tests.language_models import decoder_by_recipe, transformers

#: option -> values in its range, values out of range
VALUES = {
    "temperature": ((0, 0.7, 1, 100.0), (-0.1, math.inf, math.nan, "1", True)),
    "top_k": ((0, 1, 50), (-1, 1.5, math.nan, "5", False)),
    "top_p": ((0, 0.9, 1.0), (-0.1, 1.5, math.nan, "0.9", True)),
    "min_p": ((0, 0.05, 1), (-0.1, 1.01)),
    "top_h": ((0.4, 1), (0, 1.01)),
    "typical_p": ((0.2, 1.0), (0, 1.01)),
    "epsilon_cutoff": ((0, 3e-4), (1, -1e-4)),
    "eta_cutoff": ((0, 3e-4), (1, -1e-4)),
    "repetition_penalty": ((0.5, 1, 1.3), (0, -1, math.inf, math.nan)),
}


@pytest.mark.parametrize("option", RANGES)
def test_ranges(option):
    right, wrong = VALUES[option]
    for value in right:
        assert fault_of(option, value) is None
        check_sampling({option: value})
        check_sampling({}, transformers.GenerationConfig(**{option: value}))
    for value in wrong:
        with pytest.raises(MXError, match=rf"^{option}={value!r} must be an? [a-z]+"):
            check_sampling({option: value})


def test_options_come_before_configs():
    config = transformers.GenerationConfig()
    config.top_p = 1.5  # transformers accepts it and disables the filter
    with pytest.raises(MXError, match=r"^top_p=1\.5 must be a number from 0 to 1"):
        check_sampling({"generation_config": config})
    with pytest.raises(MXError, match=r"^top_p=1\.5"):
        check_sampling({}, config)
    check_sampling({"top_p": 0.5}, config)
    check_sampling({"generation_config": transformers.GenerationConfig()}, config)


def test_a_temperature_of_0_is_for_the_likeliest_token():
    check_sampling({"do_sample": False, "temperature": 0.0})
    with pytest.raises(MXError, match=r"^temperature=0 divides by 0: give do_sample=False"):
        check_sampling({"do_sample": True, "temperature": 0.0})


def test_values_that_no_program_returns():
    check_outputs({"output_hidden_states": False}, transformers.GenerationConfig())
    for options in ({"output_hidden_states": True}, {"generation_config": config(output_hidden_states=True)}):
        with pytest.raises(MXError, match=r"^output_hidden_states=True asks for the hidden states: a program returns"):
            check_outputs(options)
    with pytest.raises(MXError, match=r"^output_attentions=True asks for the weights of attention"):
        check_outputs({}, config(output_attentions=True))
    model = decoder_by_recipe("mxfp4_weight_only", "llama")
    for call in (model, model.generate):
        with pytest.raises(MXError, match=r"^output_hidden_states=True .* set it to False"):
            call(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)


def config(**fields):
    return transformers.GenerationConfig(return_dict_in_generate=True, **fields)


@pytest.mark.parametrize("quantizer", ["mxint8", pt2mx.get_default_mx_quantization_config("mxint8")])
def test_what_is_no_quantizer(quantizer):
    with pytest.raises(MXError, match=rf"^expected an MXQuantizer, not {type(quantizer).__name__}: make one with"):
        pt2mx.quantize_language_model(None, quantizer)


@pytest.mark.parametrize("token", [300, -1])
def test_a_token_outside_the_vocabulary(token):
    model = decoder_by_recipe("mxfp4_weight_only", "llama")
    cache = model(torch.tensor([[1, 2], [3, 4]])).past_key_values
    with pytest.raises(MXError, match=rf"^input_ids hold the token {token}, but .* the tokens 0 to 299: use"):
        model(torch.tensor([[5], [token]]), past_key_values=cache)
    for prompt in (torch.tensor([[1, token, 2]]), torch.tensor([[token]])):
        for call in (model, lambda ids: model.generate(ids, max_new_tokens=2, pad_token_id=0)):
            with pytest.raises(MXError, match=rf"^input_ids hold the token {token}, but .* the tokens 0 to 299: use"):
                call(prompt)
