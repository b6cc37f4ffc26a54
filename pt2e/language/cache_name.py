"""The name of the cache in the arguments and outputs of transformers' models.

Since version 5.24 it is `cache`. Before, it was `past_key_values`, and `cache_params` in models without attention.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pt2mx.extras import import_extra

_outputs = import_extra("transformers.modeling_outputs", "hf")

#: every name, the newest first
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
#: the name in the installed version of transformers, of models with attention and of `generate`
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(_outputs.CausalLMOutputWithPast)})


def cache_in(output: Any) -> Any:
    """Return the cache in the output of a model, None if there is none."""
    return next((output[name] for name in CACHE_NAMES if name in output), None)
