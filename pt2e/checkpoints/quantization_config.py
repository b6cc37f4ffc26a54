"""`PT2MXConfig`: MX formats for transformers' `from_pretrained`. Its import registers them with transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.selection import check_weights_only
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

import_extra("transformers", "hf")

from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from pt2mx.pt2e.checkpoints.hf_quantizer import MXHfQuantizer  # noqa: E402

#: `quant_method` in the config.json of what `save_pretrained` writes
METHOD = "pt2mx"


@register_quantization_config(METHOD)
class PT2MXConfig(QuantizationConfigMixin):
    """The `quantization_config` by which `from_pretrained` quantizes linear layers and embeddings as it loads them.

    A weight is quantized when it arrives, so that no float copy of the model exists, and stays packed; inputs are
    quantized at each call where the recipe says so. `save_pretrained` writes codes and scales, and `from_pretrained`
    reads them back to the bit, once `pt2mx.PT2MXConfig` has been imported. A head that shares the weight of the
    embedding gets codes of its own. Other products, such as those of attention, and experts stay in high precision.

    Args:
        recipe: the name of a shipped recipe, the path of one, an `MXQuantizer`, or its `to_dict()`.
        weight: the format of all weights, in place of a recipe.
        activation: the format of inputs beside `weight`.
        modules_to_not_convert: names of modules that are left alone, or patterns, as other quantizers of transformers
            take them.
        part: the top-level module of the checkpoint that the model holds, such as "language_model": others may be left
            out.
        allow_partial: True: any part of the checkpoint may be left out.
        quant_method: "pt2mx", as config.json has it.

    Raises:
        MXError: for neither or both of a recipe and formats, for what is wrong in them, and for a recipe whose
            algorithms need calibration or that has a format of a cache. Loading raises one for a model that leaves out
            more of the checkpoint than unused heads.

    Example:
        >>> import tempfile, torch, transformers
        >>> from pt2mx import PT2MXConfig
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     quantized = transformers.AutoModelForCausalLM.from_pretrained(
        ...         folder, quantization_config=PT2MXConfig("mxfp4_weight_only")
        ...     )
        >>> quantized.model.layers[0].mlp.up_proj
        MXLinear(32, 32, weight=mxfp4_e2m1{32}(even,even), activation=None, bias=False)
    """

    def __init__(
        self,
        recipe: str | os.PathLike[str] | MXQuantizer | Mapping[str, object] | None = None,
        *,
        weight: object = None,
        activation: object = None,
        modules_to_not_convert: Sequence[str] | None = None,
        part: str | None = None,
        allow_partial: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        formats = weight is not None or activation is not None
        if formats == (recipe is not None):
            raise MXError(
                "give either a recipe, such as PT2MXConfig('mxfp4'), or formats, as PT2MXConfig(weight='mxfp4')"
            )
        if quant_method != METHOD:
            raise MXError(f"quant_method={quant_method!r} is another quantizer's: it must be {METHOD!r}")
        self.quant_method = METHOD
        self.recipe = _plain(recipe) if recipe is not None else _plain(_of_formats(weight, activation))
        self.part, self.allow_partial = part, allow_partial
        self.modules_to_not_convert = None if modules_to_not_convert is None else _patterns(modules_to_not_convert)

    @property
    def quantizer(self) -> MXQuantizer:
        """The quantizer that the recipe describes."""
        return MXQuantizer.from_dict(self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json says: how the model is quantized, and not what was left out of the checkpoint."""
        return {name: value for name, value in super().to_dict().items() if name not in ("part", "allow_partial")}


register_quantizer(METHOD)(MXHfQuantizer)


def _of_formats(weight: object, activation: object) -> MXQuantizer:
    if weight is None:
        raise MXError("give a format of weights: those are what a checkpoint holds")
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight, activation=activation))


def _patterns(names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise MXError(f"modules_to_not_convert={names!r} must be a list of names or patterns, such as ['lm_head']")
    for name in names:
        try:
            re.compile(name)
        except re.error as error:
            raise MXError(f"modules_to_not_convert: {name!r} is no regular expression: {error}") from None
    return list(names)


def _plain(recipe: object) -> dict[str, Any]:
    """The settings as `from_dict` takes them, of values that JSON has."""
    if isinstance(recipe, str | os.PathLike):
        quantizer = MXQuantizer.from_recipe(recipe)
    elif isinstance(recipe, Mapping):
        quantizer = MXQuantizer.from_dict(recipe)
    elif isinstance(recipe, MXQuantizer):
        quantizer = recipe
    else:
        raise MXError(f"a recipe is a name, a path, an MXQuantizer or its to_dict(), not {recipe!r}")
    check_weights_only(quantizer)
    settings = {key: value for key, value in quantizer.to_dict().items() if value}
    try:
        return json.loads(json.dumps(settings))
    except TypeError:
        raise MXError("the recipe names observers, which no checkpoint holds: leave them out") from None
