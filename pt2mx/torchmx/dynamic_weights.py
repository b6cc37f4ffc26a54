"""`mx_dynamic_activation_mx_weights` for torchao's `quantize_`: a config, and the function that applies it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pt2mx.errors import MXError
from pt2mx.extras import without_log_warnings
from pt2mx.torchmx.config import QLinearConfig
from pt2mx.torchmx.layers.mx_linear import MXInferenceLinear

with without_log_warnings():
    from torchao.core.config import AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler


@dataclass(frozen=True)
class MXDynamicActivationMXWeightsConfig(AOBaseConfig):
    """Make each linear layer an `MXInferenceLinear` of that config; the layer stays the same object."""

    qconfig: QLinearConfig


@register_quantize_module_handler(MXDynamicActivationMXWeightsConfig)
def _quantize(linear: nn.Linear, config: MXDynamicActivationMXWeightsConfig) -> nn.Linear:
    if isinstance(linear, MXInferenceLinear) and linear.qconfig == config.qconfig:
        return linear  # several modules share it
    if type(linear) is not nn.Linear:
        raise MXError(
            f"a {type(linear).__name__} is quantized already, or has a forward of its own: leave it out with the "
            "filter_fn of quantize_"
        )
    quantized = MXInferenceLinear.from_float(linear, config.qconfig)
    # in place, as TorchMX does it: quantize_ cannot replace a model that is itself a linear layer
    linear.weight, linear.__class__ = quantized.weight, MXInferenceLinear
    linear.qconfig = quantized.qconfig  # type: ignore[assignment]  # a module's further attributes are not declared
    return linear
