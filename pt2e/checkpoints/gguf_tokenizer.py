"""The vocabulary of a tokenizer as metadata of a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.gguf_file import GGUFFile

#: a token of one byte in a vocabulary of SentencePiece
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: a part of the rule by which a tokenizer splits texts -> llama.cpp's name of the rule, in order of precedence
_SPLITS = {
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]": "gpt-4o",
    r"\p{N}{1,3}": "llama-bpe",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|": "qwen2",
    '"individual_digits": true': "smollm",
    '"ByteLevel"': "gpt-2",
}

#: type of a value -> the function that adds it to a GGUFWriter
_ADD: dict[type, Callable[[Any, str, Any], None]] = {
    bool: lambda writer, key, value: writer.add_bool(key, value),
    int: lambda writer, key, value: writer.add_uint32(key, value),
    float: lambda writer, key, value: writer.add_float32(key, value),
    str: lambda writer, key, value: writer.add_string(key, value),
    list: lambda writer, key, value: writer.add_array(key, value),
}


def add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Add a tokenizer's vocabulary, merges, special tokens and chat template to a GGUFWriter.

    Args:
        writer: the GGUFWriter.
        tokenizer: a tokenizer of transformers, or a GGUF file, whose tokenizer is copied; None: the file has no
            vocabulary.
        size: the tokens of the model; those that the tokenizer lacks are there without a use.

    Raises:
        MXError: for a tokenizer without merges of byte pairs, and for one that splits texts in a way that llama.cpp
            has no name for.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    if isinstance(tokenizer, GGUFFile):
        for key, value in tokenizer.metadata.items():
            if key.startswith("tokenizer.") and not key.endswith("_token_id"):  # the configuration has these
                _ADD[type(value)](writer, key, value)
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {} if backend is None else json.loads(backend.to_str())
    model = state.get("model", {})
    # a byte-level vocabulary has each text; others are SentencePiece's
    is_byte_level = '"ByteLevel"' in json.dumps(state.get("pre_tokenizer"))
    if model.get("type") != "BPE" or (is_byte_level and not model["merges"]):
        raise MXError(f"a GGUF file cannot hold a {type(tokenizer).__name__}: it has no merges of byte pairs")
    types, by_id = _types(model, state["added_tokens"], has_unknown=not is_byte_level), {}
    for token, number in (*model["vocab"].items(), *((one["content"], one["id"]) for one in state["added_tokens"])):
        by_id[number] = token
    kinds = import_extra("gguf", "gguf").TokenType
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(size, *by_id) if by_id else size)][:size]
    if not is_byte_level:
        # SentencePiece orders tokens by their score
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_add_space_prefix("Prepend" in json.dumps(state["normalizer"]))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(state, tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(i, kinds.NORMAL if i in by_id else kinds.UNUSED) for i in range(len(tokens))])
    if model["merges"]:
        writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in model["merges"]])
    if getattr(tokenizer, "unk_token_id", None) is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(tokenizer.chat_template)
    if (adds := getattr(tokenizer, "add_bos_token", None)) is not None:
        writer.add_add_bos_token(bool(adds))


def _types(model: dict[str, Any], added: list[dict[str, Any]], has_unknown: bool) -> dict[int, int]:
    """Return token -> its type, for tokens that are no usual ones."""
    kinds = import_extra("gguf", "gguf").TokenType
    types = {number: kinds.BYTE for token, number in model["vocab"].items() if _BYTE.fullmatch(token)}
    types |= {one["id"]: kinds.CONTROL if one["special"] else kinds.USER_DEFINED for one in added}
    unknown = model["vocab"].get(model.get("unk_token"))
    return types | ({unknown: kinds.UNKNOWN} if has_unknown and unknown is not None else {})


def _split(state: dict[str, Any], tokenizer: Any) -> str:
    """Return llama.cpp's name of the rule by which a tokenizer splits texts."""
    rule = json.dumps(state["pre_tokenizer"])
    for part, name in _SPLITS.items():
        if part in rule or json.dumps(part)[1:-1] in rule:
            return name
    raise MXError(f"llama.cpp has no name for the way in which the {type(tokenizer).__name__} splits texts")
