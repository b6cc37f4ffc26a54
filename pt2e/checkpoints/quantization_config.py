"""`PT2MXConfig`: quantize in transformers' `from_pretrained`. The import registers config and quantizer there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.eager_modules import PackedWeight, packed_layer
from pt2mx.pt2e.checkpoints.select_weights import LayerSpecs, as_matrix, check_weights_only, select_weights
from pt2mx.pt2e.flow.packed_weights import packed_bytes
from pt2mx.pt2e.models.checkpoint_files import entries_in
from pt2mx.pt2e.models.coverage import CheckpointValues
from pt2mx.pt2e.models.module_schemes import are_experts, tied_names
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

import_extra("transformers", "hf")

from transformers.core_model_loading import ConversionOps  # noqa: E402
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.quantizers.quantizers_utils import should_convert_module  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: `quant_method` in the config.json that `save_pretrained` writes
METHOD = "pt2mx"


@register_quantization_config(METHOD)
class PT2MXConfig(QuantizationConfigMixin):
    """The `quantization_config` with which `from_pretrained` quantizes linear layers and embeddings as it loads them.

    Each weight is quantized when it is loaded and stays packed, so no float copy of the model exists. Each call
    quantizes inputs that have a format in the recipe. `save_pretrained` writes codes and scales. `from_pretrained`
    reads them back to the bit, once `pt2mx.PT2MXConfig` has been imported. A head that shares the weight of the
    embedding gets its own codes. Other matmuls, such as in attention, and experts stay in high precision.

    Args:
        recipe: the name of a shipped recipe, the path of one, an `MXQuantizer`, or its `to_dict()`.
        weight: the format of all weights, instead of a recipe.
        activation: the format of inputs, together with `weight`.
        modules_to_not_convert: names or patterns of modules to skip, as for other quantizers of transformers.
        part: the top-level module of the checkpoint that the model holds, such as "language_model"; the others may be
            left out.
        allow_partial: True: the model may leave out any part of the checkpoint, and take codes without a scale for
            values.
        quant_method: "pt2mx", the value in config.json.

    Raises:
        MXError: for neither or both of a recipe and formats; for invalid ones; for a recipe with algorithms or a format
            of a cache. Loading raises one for a model that leaves out other parts of the checkpoint than unused heads.

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
        """Return the content for config.json, which does not record the parts left out of the checkpoint."""
        return {name: value for name, value in super().to_dict().items() if name not in ("part", "allow_partial")}


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
    """Return the settings of a recipe for `from_dict`, as plain JSON values."""
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


@register_quantizer(METHOD)
class MXHfQuantizer(HfQuantizer):
    """The quantizer that transformers calls while it loads a model with a `PT2MXConfig`.

    It replaces layers by packed ones: at once if the checkpoint holds codes, otherwise as each weight is loaded."""

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        if checkpoint_files and not self.pre_quantized:  # codes come from a complete model
            CheckpointValues(model, entries_in(checkpoint_files)).held_by().check(config.part, config.allow_partial)
        patterns = self.get_modules_to_not_convert(
            model, config.modules_to_not_convert or [], model._keep_in_fp32_modules
        )
        skipped = {
            name
            for name, module in model.named_modules()
            if are_experts(module) or not should_convert_module(name, patterns)
        }
        self._chosen: dict[str, LayerSpecs] = select_weights(model, config.quantizer, skipped, tied=True).chosen
        self._untied = _untie(model, self._chosen)
        if not self._chosen:
            raise MXError(
                f"the recipe selects no linear layer and no embedding of {type(model).__name__}: give another recipe, "
                "or fewer modules_to_not_convert"
            )
        if self.pre_quantized:
            for weight, specs in self._chosen.items():
                name = weight.rpartition(".")[0]
                model.set_submodule(name, packed_layer(model.get_submodule(name), specs))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self._untied:  # the config now says that nothing is tied: copy other tied tensors, such as BERT's head bias
            for name in model.all_tied_weights_keys:
                path, _, attribute = name.rpartition(".")
                tied = model.get_parameter(name)
                setattr(model.get_submodule(path), attribute, nn.Parameter(tied.detach().clone(), tied.requires_grad))
            model.all_tied_weights_keys = {}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and param_name in self._chosen

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return packed_bytes(param.shape, self._chosen[param_name].weight) / max(param.numel(), 1)
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self._chosen, self._untied)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        raise MXError("the float weights are gone: load the model again without a quantization_config")


def _untie(model: PreTrainedModel, chosen: dict[str, LayerSpecs]) -> dict[str, set[str]]:
    """Untie an embedding and a head that share a weight: each gets its own codes, because their formats may differ.

    Weights of more than two modules stay tied and are removed from `chosen`, because encoder-decoder models scale
    outputs only if weights are tied.

    Returns:
        Parameter -> the names under which its weight is quantized.
    """
    untied = {}
    for name, names in tied_names(model).items():
        if names <= chosen.keys() and len(names) == 2 and not model.config.is_encoder_decoder:
            untied[name] = names
    for name in tied_names(model).keys() - untied.keys():
        chosen.pop(name, None)
    if untied:
        model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k not in untied}
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return untied


class _Quantize(ConversionOps):
    """Replaces the layers of loaded weights by packed ones; passes other tensors on."""

    def __init__(self, chosen: dict[str, LayerSpecs], untied: dict[str, set[str]]) -> None:
        self._chosen, self._untied = chosen, untied

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str], **kwargs: Any
    ) -> dict[str, Any]:
        others = {}
        for key, value in input_dict.items():
            if key not in self._chosen:
                others[key] = value
                continue
            for weight in self._untied.get(key, {key}):
                self._pack(model, weight, value[0] if isinstance(value, list) else value)
                missing_keys.discard(weight)
        return others

    def _pack(self, model: nn.Module, weight: str, values: Tensor) -> None:
        name = weight.rpartition(".")[0]
        layer = model.get_submodule(name)
        if isinstance(layer, PackedWeight):  # the checkpoint holds a tied weight twice
            return
        packed = packed_layer(layer, self._chosen[weight])
        packed.pack(as_matrix(layer, values))
        for buffer in packed.buffers():
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]  # otherwise transformers initializes it again
        model.set_submodule(name, packed)
