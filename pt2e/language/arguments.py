"""Checks of the arguments of language models, made before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.ranges import RANGES, fault_of

#: field of a configuration: the number of tokens that the program reads at most
LONGEST_TEXT = "pt2mx_longest_text"


def check_model(model: object) -> None:
    """Raise an `MXError` where `model` is no language model of transformers."""
    transformers = import_extra("transformers", "hf")
    if not isinstance(model, transformers.PreTrainedModel):
        raise MXError(f"expected a language model of transformers, not {type(model).__name__}")
    if not model.can_generate():
        raise MXError(
            f"{type(model).__name__} generates no text, and has no cache: export it by itself, as "
            "`pt2mx quantize --output NAME.pt2` does"
        )


def check_texts(texts: Sequence[Tensor | Mapping[str, Tensor]], vocabulary: int, name: str = "input_ids") -> None:
    """Raise an `MXError` where a text is no block of tokens, (B, S) int64, nor what a processor gives.

    `name` is the main input of the model; of audio it is floats."""
    if not isinstance(texts, Sequence) or isinstance(texts, str):
        raise MXError(
            f"texts must be a list of tokens, (B, S) int64 each, not one {type(texts).__name__}: pass [tokens]"
        )
    for one in texts:
        if name != "input_ids" and isinstance(one, Tensor) and one.is_floating_point():
            continue
        text = one.get("input_ids") if isinstance(one, Mapping) else one
        shape = tuple(text.shape) if isinstance(text, Tensor) else None
        if not isinstance(text, Tensor) or text.dtype != torch.long or text.dim() != 2 or not text.numel():
            actual = f"{text.dtype} of shape {shape}" if isinstance(text, Tensor) else type(text).__name__
            raise MXError(f"texts must be tokens, (B, S) int64 each, not {actual}: tokenize them first")
        if not 0 <= int(text.min()) <= int(text.max()) < vocabulary:
            raise MXError(f"texts hold tokens from {int(text.min())} to {int(text.max())}: the model has {vocabulary}")


def check_prompts(text: object, inputs: object, options: dict[str, Any]) -> list[str]:
    """Return the prompts in `text`; raise an `MXError` where it is no prompt, or where tokens are also passed."""
    given = [text] if isinstance(text, str) else text
    prompts = list(given) if isinstance(given, list | tuple) else []
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise MXError(f"text={text!r} must be a prompt or a list of prompts, none of them empty")
    tokens = [name for name in ("input_ids", "attention_mask") if options.get(name) is not None]
    if tokens := ["inputs"] * (inputs is not None) + tokens:
        raise MXError(f"text and {tokens[0]} say the same: give one of them")
    return prompts


def check_no_text(inputs: object) -> None:
    """Raise an `MXError` for prompts in place of tokens."""
    if isinstance(inputs, str) or (isinstance(inputs, list | tuple) and any(isinstance(one, str) for one in inputs)):
        raise MXError(f"inputs are tokens, (B, S) int64, not {inputs!r}: pass prompts as text=...")


def check_tokens(input_ids: object) -> Tensor:
    """Return tokens, (B, S); raise an `MXError` for anything else."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        actual = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else input_ids
        raise MXError(f"input_ids must be tokens, (B, S) int64, not {actual!r}")
    if not input_ids.numel():
        raise MXError(f"input_ids of shape {tuple(input_ids.shape)} hold no token: give one at least")
    return input_ids


def check_mask(mask: Tensor | None, tokens: Tensor) -> None:
    """Raise an `MXError` for a mask of other sequences than tokens, (B, S)."""
    if mask is not None and (mask.dim() != 2 or len(mask) != len(tokens)):
        raise MXError(f"attention_mask must be of shape {tuple(tokens.shape)}, not {tuple(mask.shape)}")


def check_step(
    input_ids: object, attention_mask: Tensor | None, position_ids: Tensor | None, batch: int, filled: int, slots: int
) -> None:
    """Raise an `MXError` where tokens do not fit into the cache, or mask and positions do not match the tokens."""
    shape_of_tokens = check_tokens(input_ids).shape
    if shape_of_tokens[0] != batch:
        raise MXError(f"input_ids hold {shape_of_tokens[0]} sequences, the cache {batch}: make another cache")
    length = filled + shape_of_tokens[1]
    if length > slots:
        raise MXError(
            f"{filled} + {shape_of_tokens[1]} tokens do not fit into a cache of {slots}: make one with "
            f"new_cache({batch}, tokens)"
        )
    for name, tensor, shape in (
        ("attention_mask", attention_mask, (batch, length)),
        ("position_ids", position_ids, tuple(shape_of_tokens)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise MXError(f"{name} must be of shape {shape}, not {tuple(tensor.shape)}")


def check_source(name: str, source: object, mask: Tensor | None, expected: Tensor, vocabulary: int) -> None:
    """Raise an `MXError` for a source of another dtype or shape than the encoder takes, a token that it does not know,
    or a mask that does not fit.

    Args:
        name: the name of the source.
        source, mask: the arguments.
        expected: the source in the example of the program; its dimensions that are no number may have any size.
        vocabulary: the number of tokens that the encoder knows.
    """
    sizes = [size if isinstance(size, int) else None for size in expected.shape]
    if (
        not isinstance(source, Tensor)
        or source.is_floating_point() != expected.is_floating_point()
        or source.dim() != len(sizes)
        or any(size not in (None, of_source) for size, of_source in zip(sizes, source.shape, strict=True))
    ):
        actual = (
            f"{source.dtype} of shape {tuple(source.shape)}" if isinstance(source, Tensor) else type(source).__name__
        )
        shape = ", ".join("any" if size is None else str(size) for size in sizes)
        raise MXError(f"{name} must be {expected.dtype} of shape ({shape}), not {actual}")
    if not source.numel():
        raise MXError(f"{name} of shape {tuple(source.shape)} is empty: give one source at least")
    if not source.is_floating_point():
        check_vocabulary(name, source, vocabulary)
    if mask is not None and source.dim() == 2 and mask.shape != source.shape:
        raise MXError(f"attention_mask must be of shape {tuple(source.shape)}, not {tuple(mask.shape)}")


def check_vocabulary(name: str, tokens: Tensor, vocabulary: int) -> None:
    """Raise an `MXError` for a token that the model does not know; a GPU waits for the check."""
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if unknown.numel():
        raise MXError(
            f"{name} hold the token {int(unknown[0])}, but the vocabulary of the model has the tokens 0 to "
            f"{vocabulary - 1}: use the model's own tokenizer"
        )


def check_length(config: object, tokens: int) -> None:
    """Raise an `MXError` for a text that is longer than the program's frequencies of RoPE allow."""
    longest = getattr(config, LONGEST_TEXT, None)
    if longest is not None and tokens > longest:
        raise MXError(
            f"a text of {tokens} tokens is longer than {longest}, for which the program has the frequencies of RoPE: "
            f"quantize the model with length={tokens}, or --text-length {tokens}"
        )


#: new tokens of a call of `generate` that asks for no number
NEW_TOKENS = 20
#: settings of `generate` that may end a text before its longest length
_ENDS = ("eos_token_id", "stop_strings", "stopping_criteria", "max_time")


def asked_tokens(settings: Mapping[str, Any], length: int) -> int | None:
    """Return the number of new tokens that settings of `generate` ask for after prompts of a length; None: none."""
    new, longest = settings.get("max_new_tokens"), settings.get("max_length")
    return new if new is not None else None if longest is None else longest - length


def default_tokens(config: object, length: int) -> int:
    """Return the number of new tokens that transformers takes where no setting has one; it refuses 0 and less."""
    known = getattr(config, "max_position_embeddings", None)
    return NEW_TOKENS if known is None else min(NEW_TOKENS, known - length)


def may_end(options: Mapping[str, Any], *configs: object) -> bool:
    """Return whether a text may end before it is as long as a call of `generate` asks for; `configs` are its others."""
    return any(_setting(name, options, configs) is not None for name in _ENDS)


def inferred_mask(tokens: Tensor, options: Mapping[str, Any], *configs: object) -> Tensor | None:
    """Return the mask that `generate` infers from tokens of padding, (B, S) int64; None: it infers none."""
    pad, ends = (_setting(name, options, configs) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or (ends is not None and pad in torch.as_tensor(ends)):
        return None
    return tokens.ne(pad).long()


def _setting(name: str, options: Mapping[str, Any], configs: Iterable[object]) -> Any:
    """Return a setting of `generate`: an option, or else that of the first configuration that has one."""
    others = (getattr(config, name, None) for config in configs)
    return options[name] if name in options else next((one for one in others if one is not None), None)


#: option of transformers' `generate` and models -> what it returns
_NOT_RETURNED = {"output_attentions": "the weights of attention", "output_hidden_states": "the hidden states"}


def check_outputs(options: Mapping[str, object], defaults: object = None) -> None:
    """Raise an `MXError` where a call asks for values that no program returns.

    Args:
        options: the options of `generate` or of a call of the model.
        defaults: the generation config to use without one in the options.
    """
    config = options.get("generation_config") or defaults
    for name, values in _NOT_RETURNED.items():
        if options.get(name, getattr(config, name, None)):
            raise MXError(
                f"{name}=True asks for {values}: a program returns logits alone; leave it out, or set it to False"
            )


def check_sampling(options: Mapping[str, object], defaults: object = None) -> None:
    """Check the options of `generate`.

    Args:
        options: the options of transformers' `generate`, which may include a `generation_config`.
        defaults: the generation config to use without one.

    Raises:
        MXError: for a value out of its range; for a temperature of 0 where tokens are sampled.
    """
    config = options.get("generation_config") or defaults
    values = {name: options.get(name, getattr(config, name, None)) for name in (*RANGES, "do_sample")}
    for name in RANGES:
        if values[name] is not None and (fault := fault_of(name, values[name])):
            raise MXError(f"{name}={values[name]!r} {fault}")
    if values["do_sample"] and values["temperature"] == 0:
        raise MXError("temperature=0 divides by 0: give do_sample=False for the likeliest tokens")
