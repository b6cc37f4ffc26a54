import contextlib

import pytest
import torch

import pt2mx
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.shared_sizes import shared_sizes
from tests.language_models import exported_decoder, tiny_decoder


def symbols(program):
    return {str(size) for node in program.graph.nodes if node.op == "placeholder" for size in node.meta["val"].shape}


def created_symbols(program):
    """Return the number of symbols that the trace of a program had."""
    (first, *_) = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    return len(first.fake_mode.shape_env.var_to_range)


def operators(program):
    return [str(node.target) for node in program.graph.nodes if "sym_size" not in str(node.target)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
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
