import contextlib

import pytest
import torch

import pt2mx
from pt2mx import LanguageModel, MXError
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.decoder import export_decoder, inputs, shared_sizes
from pt2mx.pt2e.language.layers import layers_of
from tests.language_models import FAMILIES, exported_decoder, padded, tiny_decoder, transformers

#: families that differ in the program: one mask, two masks, eager attention with sinks and experts, no RoPE, no
#: attention, both attention and convolutions
DEFAULT = ("llama", "gemma3", "gpt_oss", "gpt2", "mamba", "lfm2")
EACH = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def exported(family):
    """A model, and its program as a module."""
    model, program = exported_decoder(family)
    return model, program.module()


#: families whose logits in float32 differ more from those in float64
LESS_EXACT = ("deepseek_v4", "gemma4", "gpt_neo", "jamba", "qwen3_next")


def close(logits, expected, family=None):
    """Compare logits, whose error grows with the largest."""
    relative = 2e-5 if family in LESS_EXACT else 2e-6
    return torch.allclose(logits, expected, atol=relative * max(1, float(expected.abs().max())))


@pytest.mark.slow_cases("gpt_oss", "gemma3", "mamba", "lfm2")
@torch.no_grad()
@pytest.mark.parametrize("family", EACH)
def test_a_prompt_and_single_tokens_give_what_the_model_gives(family):
    """The export does not change the model."""
    model, program = exported(family)
    fresh = tiny_decoder(family)
    assert model.config._attn_implementation == fresh.config._attn_implementation
    values = fresh.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    ids = torch.randint(256, (3, 76))
    expected = model(ids).logits
    call = inputs(layers_of(model), torch.device("cpu"), ids)
    prompt = {name: call[name][:, :12] for name in ("input_ids", "position_ids")}
    result = [program(**{**call, **prompt, "logits_to_keep": torch.arange(12)})]
    for i in range(12, 76):
        token = {"input_ids": ids[:, i : i + 1], "position_ids": torch.full((3, 1), i), "start": torch.tensor([i])}
        result.append(program(**{**call, **token, "logits_to_keep": torch.tensor([0])}))
    assert close(torch.cat(result, 1), expected, family)


@pytest.mark.slow_cases("gpt_oss", "mamba", "lfm2")
@torch.no_grad()
@pytest.mark.parametrize("family", DEFAULT)
def test_padding_changes_nothing(family):
    model, program = exported(family)
    ids, mask = padded()
    call = inputs(layers_of(model), torch.device("cpu"), ids)
    call["attention_mask"], call["position_ids"] = mask, (mask.cumsum(1) - 1).clamp(min=0)
    result = program(**call)
    assert result.isfinite().all()
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        assert close(result[row, padding:], model(ids[row : row + 1, padding:]).logits[0])


@torch.no_grad()
@pytest.mark.compiled
def test_the_window_of_gpt_neo_counts_from_the_tokens():
    """Its checkpoints have a window of 256: the text is longer, and the cache has free slots."""
    model = tiny_decoder("gpt_neo", window_size=256, bos_token_id=None, eos_token_id=None)
    quantized = LanguageModel(export_decoder(model), model.config, model.generation_config)
    ids = torch.randint(256, (1, 400), generator=torch.Generator().manual_seed(1))
    assert close(quantized(ids).logits, model(ids).logits, "gpt_neo")
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(quantized.generate(ids[:, :40], **options), model.generate(ids[:, :40], **options))


def test_a_model_that_keeps_nothing_of_a_known_kind():
    config = transformers.RwkvConfig(hidden_size=32, vocab_size=64, num_hidden_layers=2)
    with pytest.raises(MXError, match=r"keeps no keys and values of its tokens: only decoders whose layers") as caught:
        export_decoder(transformers.RwkvForCausalLM(config).eval())
    assert "is no causal language model" not in str(caught.value) and ".pt2 for a program without" in str(caught.value)
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(MXError, match="BertLMHeadModel keeps no keys and values of its tokens"):
        export_decoder(transformers.BertLMHeadModel(config).eval())


def test_an_export_that_fails_is_one_line(monkeypatch, capfd):
    def branch(self, input_ids, **options):
        return input_ids if input_ids.sum() > 0 else -input_ids

    model = tiny_decoder("llama")
    monkeypatch.setattr(decoder, "layers_of", lambda model: layers)
    layers = layers_of(model)
    monkeypatch.setattr(type(model), "forward", branch)
    with pytest.raises(MXError) as caught:
        export_decoder(model)
    text = str(caught.value)
    assert text.startswith(
        "LlamaForCausalLM cannot be exported with its cache: GuardOnDataDependentSymNode: Could not "
    )
    assert "; quantize it without an export" in text and len(text) < 450 and "\n" not in text
    assert capfd.readouterr().err == ""


def symbols(program):
    return {str(size) for node in program.graph.nodes if node.op == "placeholder" for size in node.meta["val"].shape}


def created_symbols(program):
    """Return the number of symbols that the trace of a program had."""
    (first, *_) = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    return len(first.fake_mode.shape_env.var_to_range)


def operators(program):
    return [str(node.target) for node in program.graph.nodes if "sym_size" not in str(node.target)]


@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.compiled_cases("llama")
def test_equal_sizes_have_one_symbol(family, monkeypatch):
    model, program = exported_decoder(family)
    monkeypatch.setattr(decoder, "shared_sizes", lambda example: contextlib.nullcontext())
    proved = decoder.export_decoder(model)
    assert operators(program) == operators(proved)
    call = decoder.inputs(layers_of(model), torch.device("cpu"), torch.arange(15).reshape(3, 5), slots=9)
    again = decoder.inputs(layers_of(model), torch.device("cpu"), torch.arange(15).reshape(3, 5), slots=9)
    assert torch.equal(program.module()(**call), proved.module()(**again))
    assert len(program.range_constraints) == len(proved.range_constraints) == 4  # batch, tokens, slots, logits
    assert len(symbols(program)) == len(symbols(proved))
    assert created_symbols(program) < 10 < created_symbols(proved)


@pytest.mark.parametrize("check_guards", [True, False])
def test_other_sizes_run_and_unequal_ones_are_refused(check_guards):
    model, program = exported_decoder("llama")
    graph, layers = program.module(check_guards=check_guards), layers_of(model)
    tokens = torch.arange(15).reshape(3, 5)
    call = decoder.inputs(layers, torch.device("cpu"), tokens, slots=9)
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(graph(**call), expected)
    call["keys"][1] = call["keys"][1][:, :, :8].clone()
    with pytest.raises((AssertionError, RuntimeError), match=r"keys.*1"):
        graph(**call)


@pytest.mark.compiled
def test_examples_with_equal_sizes_share_no_symbol():
    model = tiny_decoder("llama")
    layers = layers_of(model)
    example = decoder.inputs(layers, torch.device("cpu"), torch.zeros(4, 3, dtype=torch.long), slots=4)
    program = decoder.export(decoder.CachedDecoder(model, layers), example)  # a batch of 4, and 4 slots
    call = decoder.inputs(layers, torch.device("cpu"), torch.arange(6).reshape(2, 3), slots=7)
    torch.testing.assert_close(program.module()(**call), model(call["input_ids"], use_cache=False).logits)


def test_nothing_remains_of_the_context_after_an_error():
    example = decoder.inputs(layers_of(tiny_decoder("llama")), torch.device("cpu"))
    with pytest.raises(KeyError), shared_sizes(example):
        raise KeyError
    assert torch._guards.TracingContext.try_get() is None


@pytest.mark.compiled
def test_a_decoder_that_reads_an_address_is_refused():
    model = tiny_decoder("llama")
    forward = model.model.forward

    def with_address(*args, **kwargs):
        result = forward(*args, **kwargs)
        result.last_hidden_state = result.last_hidden_state + torch.ones(3).sin().data_ptr() % 2
        return result

    model.model.forward = with_address
    with pytest.raises(pt2mx.MXError, match="Cannot access data pointer"):
        decoder.export_decoder(model)
