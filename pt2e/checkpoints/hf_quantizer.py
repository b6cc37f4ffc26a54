"""The quantizer that transformers calls while it loads a model with a `PT2MXConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.checkpoint_sizes import sizes_in
from pt2mx.pt2e.checkpoints.coverage import CheckpointValues
from pt2mx.pt2e.checkpoints.eager_modules import PackedWeight, packed_twin
from pt2mx.pt2e.checkpoints.model_modules import are_experts, tied_names
from pt2mx.pt2e.checkpoints.selection import LayerSpecs, as_matrix, select_weights
from pt2mx.pt2e.stored_bits import packed_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MXHfQuantizer(HfQuantizer):
    """Replaces layers by packed ones: at once where the checkpoint holds codes, else as their weights arrive."""

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        if checkpoint_files and not self.pre_quantized:  # what is quantized was saved of the model itself
            CheckpointValues(model, sizes_in(checkpoint_files)).held_by().check(config.part, config.allow_partial)
        patterns = self.get_modules_to_not_convert(
            model, config.modules_to_not_convert or [], model._keep_in_fp32_modules
        )
        skipped = {
            name
            for name, module in model.named_modules()
            if are_experts(module) or not should_convert_module(name, patterns)
        }
        self._chosen: dict[str, LayerSpecs] = select_weights(model, config.quantizer, skipped, tied=True).chosen
        self._same = _untie(model, self._chosen)
        if not self._chosen:
            raise MXError(
                f"the recipe selects no linear layer and no embedding of {type(model).__name__}: give another recipe, "
                "or fewer modules_to_not_convert"
            )
        if self.pre_quantized:
            for weight, specs in self._chosen.items():
                name = weight.rpartition(".")[0]
                model.set_submodule(name, packed_twin(model.get_submodule(name), specs))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self._same:  # the config says then that nothing is tied: what is, such as the bias of BERT's head, is copied
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
        return _Quantize(self._chosen, self._same)

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
    """Have an embedding and a head that share a weight hold codes of their own, as their formats may differ. Weights
    that more modules share stay, for an encoder and a decoder scale by whether they do.

    Returns:
        Parameter -> the names under which its weight is quantized. `chosen` loses what stays.
    """
    same = {}
    for name, names in tied_names(model).items():
        if names <= chosen.keys() and len(names) == 2 and not model.config.is_encoder_decoder:
            same[name] = names
    for name in tied_names(model).keys() - same.keys():
        chosen.pop(name, None)
    if same:
        model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k not in same}
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return same


class _Quantize(ConversionOps):
    """Puts packed layers into the model in place of those whose weights have arrived; other tensors go on."""

    def __init__(self, chosen: dict[str, LayerSpecs], same: dict[str, set[str]]) -> None:
        self._chosen, self._same = chosen, same

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str], **kwargs: Any
    ) -> dict[str, Any]:
        others = {}
        for key, value in input_dict.items():
            if key not in self._chosen:
                others[key] = value
                continue
            for weight in self._same.get(key, {key}):
                self._pack(model, weight, value[0] if isinstance(value, list) else value)
                missing_keys.discard(weight)
        return others

    def _pack(self, model: nn.Module, weight: str, values: Tensor) -> None:
        name = weight.rpartition(".")[0]
        layer = model.get_submodule(name)
        if isinstance(layer, PackedWeight):  # of a tied weight that the checkpoint holds twice
            return
        packed = packed_twin(layer, self._chosen[weight])
        packed.pack(as_matrix(layer, values))
        for buffer in packed.buffers():
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]  # else transformers draws it anew
        model.set_submodule(name, packed)
