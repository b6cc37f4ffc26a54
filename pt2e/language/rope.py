"""RoPE whose frequencies depend on the length of the text: fix them to those for one length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT
from pt2mx.pt2e.language.arguments import LONGEST_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: types of RoPE whose frequencies depend on the length of the text
_LENGTH_DEPENDENT = {"longrope", "dynamic"}
#: types of RoPE that divide frequencies by a factor, which multiplies the positions
_STRETCHED = {"linear", "proportional", "yarn"}
#: types of layers that read texts of any length, beside windows
_WITHOUT_LIMIT = {"linear_attention", "conv", "mamba", "moe", "mlp"}


def longest_text(model: PreTrainedModel, length: int | None = None) -> int | None:
    """Return the tokens of the longest text that a program of this model reads; None: any number.

    Some types of RoPE have frequencies that depend on the length of the text. A program has those for texts of up to
    `length` tokens; None: the number of tokens up to which the frequencies stay the same.

    Raises:
        MXError: for a model whose frequencies cannot be fixed, and a length below 1.
    """
    if length is not None and length < 1:
        raise MXError(f"a text length of {length} must be at least 1")
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (parameters, *parameters.values()) if isinstance(one, dict)}
    if not (kinds := kinds & _LENGTH_DEPENDENT):
        return None
    if parameters.get("rope_type") not in kinds or not _length_dependent(model):
        raise MXError(
            f"{type(model).__name__} has RoPE of the type {kinds.pop()!r} in some of its layers: its frequencies "
            f"depend on the length of the text, and a program reads texts of any length; {WITHOUT_EXPORT}"
        )
    return length or parameters.get("original_max_position_embeddings") or config.max_position_embeddings


def rope_positions(config: Any) -> int | None:
    """Return the number of positions that a decoder with RoPE was made for; None: any number, or another kind of model.

    Windows bound the distances of tokens, so layers that have them read texts of any length, as recurrent ones do; a
    window of more tokens than there are positions does not. Positions of images (`mrope_section`) are fewer than their
    tokens. `LONGEST_TEXT` of a configuration is a limit of its own.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    known = getattr(text, "max_position_embeddings", None)
    has_other_limit = "mrope_section" in rope or getattr(config, LONGEST_TEXT, None) is not None
    if not rope or known is None or has_other_limit or getattr(text, "alibi", False):
        return None
    positions = max(_stretched(one, known) for one in (rope, *rope.values()) if isinstance(one, dict))
    kinds = set(getattr(text, "layer_types", None) or {"sliding_attention"})
    has_window = 0 < (getattr(text, "sliding_window", None) or 0) <= positions
    is_bounded = kinds <= _WITHOUT_LIMIT | ({"sliding_attention"} if has_window else set())
    return None if is_bounded else positions


def _stretched(rope: Mapping[str, Any], known: int) -> int:
    """Return the number of positions of parameters of RoPE; a configuration says how many are known."""
    factor = rope.get("factor") if rope.get("rope_type") in _STRETCHED else None
    return max(known, int((factor or 1) * (rope.get("original_max_position_embeddings") or known)))


def _length_dependent(model: PreTrainedModel) -> list[Any]:
    """Return the modules that compute RoPE of one type, whose frequencies depend on the length of the text."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str)]
    return [module for module in modules if module.rope_type in _LENGTH_DEPENDENT]


@contextmanager
def with_frequencies_for(model: PreTrainedModel, length: int | None) -> Iterator[None]:
    """Fix the frequencies of RoPE to those for texts of this length."""
    functions = import_extra("transformers.modeling_rope_utils", "hf").ROPE_INIT_FUNCTIONS
    modules = [] if length is None else _length_dependent(model)
    original = [(module, module.rope_type, module.inv_freq, module.attention_scaling) for module in modules]
    for module in modules:
        compute = functions[module.rope_type]
        module.inv_freq, module.attention_scaling = compute(module.config, model.device, seq_len=length)
        module.rope_type = "default"
    try:
        yield
    finally:
        for module, *values in original:
            module.rope_type, module.inv_freq, module.attention_scaling = values
