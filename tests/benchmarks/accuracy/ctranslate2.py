"""Whisper in the binary files of CTranslate2, as weights of transformers.

A file is a header, the variables one after the other, and names for some of them. CTranslate2 keeps queries, keys and
values of one layer in one weight.
"""

import re
import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra

#: version of the file format, model, revision of the model
HEADER = (6, "WhisperSpec", 3)
_DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
#: module of CTranslate2 -> of transformers; several share a weight of CTranslate2
_MODULES = {
    "conv1": ("conv1",),
    "conv2": ("conv2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
    "layer_norm": ("layer_norm",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_TENSORS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}


def read(content: bytes) -> dict[str, Tensor]:
    """Return the variables of a file by name.

    Raises:
        MXError: for another model or version.
    """
    file = BytesIO(content)

    def numbers(kinds: str) -> tuple[int, ...]:
        return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))

    def text() -> str:
        (length,) = numbers("H")
        return file.read(length)[:-1].decode()  # a zero ends it

    header = (*numbers("I"), text(), *numbers("I"))
    if header != HEADER:
        raise MXError(f"version, model and revision are {header}, and must be {HEADER}: convert the model again")
    variables: dict[str, Tensor] = {}
    for _ in range(*numbers("I")):
        name, (dims,) = text(), numbers("B")
        shape, (dtype, size) = numbers(f"{dims}I"), numbers("BI")
        variables[name] = torch.frombuffer(bytearray(file.read(size)), dtype=_DTYPES[dtype]).reshape(shape)
    for _ in range(*numbers("I")):
        alias, name = text(), text()
        variables[alias] = variables[name]
    return variables


def whisper(variables: dict[str, Tensor], start: int, end: int) -> Any:
    """Return transformers' `WhisperForConditionalGeneration` in float32; `start` and `end` are tokens of its texts."""
    transformers = import_extra("transformers", "hf")
    (vocabulary, width), (hidden, _) = (
        variables[f"decoder/{name}/weight"].shape for name in ("embeddings", "layer_0/ffn/linear_0")
    )
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", sum(bool(re.fullmatch(rf"{side}/layer_\d+/ffn/linear_0/weight", key)) for key in variables)),
            ("attention_heads", int(variables[f"{side}/num_heads"])),
            ("ffn_dim", hidden),
        )
    }
    config = transformers.WhisperConfig(
        **sizes,
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        max_source_positions=len(variables["encoder/position_encodings/encodings"]),
        max_target_positions=len(variables["decoder/position_encodings/encodings"]),
        decoder_start_token_id=start,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    )
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    state = dict(_state(variables))
    model.load_state_dict({**state, "proj_out.weight": state["model.decoder.embed_tokens.weight"]})
    return model.eval()


def _state(variables: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name the tensors as transformers does."""
    for name, tensor in variables.items():
        parts = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
        if parts is None or parts[3] == "projection":  # an attribute; the embedding once more
            continue
        modules = _MODULES[parts[3]]
        prefix = f"model.{parts[1]}." + (f"layers.{parts[2]}." if parts[2] else "")
        for module, part in zip(modules, tensor.float().chunk(len(modules)), strict=True):
            if not (module.endswith("k_proj") and parts[4] == "bias"):  # zeros, which transformers leaves out
                yield f"{prefix}{module}.{_TENSORS[parts[4]]}", part
