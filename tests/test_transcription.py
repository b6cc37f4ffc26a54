"""The benchmark of Whisper: its reader of CTranslate2's files, and the word error rate."""

import struct

import pytest
import torch

from pt2mx import MXError
from tests.benchmarks.accuracy import ctranslate2
from tests.benchmarks.accuracy.whisper import word_errors
from tests.encoder_decoders import sources, tiny_encoder_decoder

#: numbers of dtypes in the file
_NUMBERS = {torch.int16: 2, torch.float32: 0, torch.float16: 4}


def text(value):
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def file_of(variables, aliases=(), version=6, model="WhisperSpec", revision=3):
    """Return the bytes of a file."""
    parts = [struct.pack("<I", version), text(model), struct.pack("<II", revision, len(variables))]
    for name, tensor in variables.items():
        values = tensor.numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        parts += [text(name), shape, struct.pack("<BI", _NUMBERS[tensor.dtype], len(values)), values]
    parts.append(struct.pack("<I", len(aliases)))
    return b"".join([*parts, *(text(name) for alias in aliases for name in alias)])


def variables_of(model):
    """Return the weights of a model of transformers as CTranslate2 has them: in float16, some of them joined."""
    found = {}
    for side in ("encoder", "decoder"):
        part = model.model.get_submodule(side)
        found[f"{side}/num_heads"] = torch.tensor(part.config.encoder_attention_heads, dtype=torch.int16)
        found[f"{side}/position_encodings/encodings"] = part.embed_positions.weight
        modules = {"layer_norm": [part.layer_norm]}
        if side == "encoder":
            modules |= {"conv1": [part.conv1], "conv2": [part.conv2]}
        for i, layer in enumerate(part.layers):
            own = layer.self_attn
            of_layer = {
                "self_attention/layer_norm": [layer.self_attn_layer_norm],
                "self_attention/linear_0": [own.q_proj, own.k_proj, own.v_proj],
                "self_attention/linear_1": [own.out_proj],
                "ffn/layer_norm": [layer.final_layer_norm],
                "ffn/linear_0": [layer.fc1],
                "ffn/linear_1": [layer.fc2],
            }
            if side == "decoder":
                cross = layer.encoder_attn
                of_layer |= {
                    "attention/layer_norm": [layer.encoder_attn_layer_norm],
                    "attention/linear_0": [cross.q_proj],
                    "attention/linear_1": [cross.k_proj, cross.v_proj],
                    "attention/linear_2": [cross.out_proj],
                }
            modules |= {f"layer_{i}/{name}": value for name, value in of_layer.items()}
        for name, joined in modules.items():
            weight, bias = ("gamma", "beta") if "norm" in name else ("weight", "bias")
            biases = [torch.zeros(len(one.weight)) if one.bias is None else one.bias for one in joined]
            found[f"{side}/{name}/{weight}"] = torch.cat([one.weight for one in joined])
            found[f"{side}/{name}/{bias}"] = torch.cat(biases)
    found["decoder/embeddings/weight"] = model.model.decoder.embed_tokens.weight
    return {name: value.detach().half() if value.is_floating_point() else value for name, value in found.items()}


def test_a_file_of_ctranslate2():
    """A small model, written by hand and read again, gives the same logits."""
    model = tiny_encoder_decoder("whisper", tie_word_embeddings=True)
    model = model.half().float()  # the file's values
    aliases = [("decoder/projection/weight", "decoder/embeddings/weight")]
    variables = ctranslate2.read(file_of(variables_of(model), aliases))
    assert variables["encoder/num_heads"] == 4 and variables["decoder/projection/weight"].shape == (300, 64)
    again = ctranslate2.whisper(variables, start=256, end=258)
    assert again.config.encoder_layers == 1 and again.config.decoder_layers == 2 and not again.training
    inputs = {**sources("whisper"), "decoder_input_ids": torch.randint(256, (3, 7))}
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("header", [{"version": 5}, {"model": "TransformerSpec"}, {"revision": 2}])
def test_other_files_of_ctranslate2_are_refused(header):
    with pytest.raises(MXError, match=rf"{next(iter(header.values()))}.*must be \(6, 'WhisperSpec', 3\)"):
        ctranslate2.read(file_of({}, **header))


@pytest.mark.parametrize(
    ("heard", "errors"),
    [("a cat sat down", 0), ("a cat sat", 1), ("cat sat down here", 2), ("a bat sat down", 1), ("", 4)],
)
def test_word_errors(heard, errors):
    assert word_errors("a cat sat down", heard) == errors and word_errors(heard, "a cat sat down") == errors
