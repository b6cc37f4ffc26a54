"""The linear layer of quantized models."""

from __future__ import annotations

from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.tensor.mx_tensor import MXTensor
from pt2mx.torchmx import mx_tensor
from pt2mx.torchmx.config import QLinearConfig


class MXInferenceLinear(nn.Linear):
    """TorchMX's `MXInferenceLinear`: `nn.Linear` whose weight, (out, in), is an `MXTensor` in blocks along `in`, and
    whose input is quantized along its last dimension at each call.

    The output is `F.linear` of both after dequantization, to the bit. `from_float` makes such layers.
    """

    qconfig: QLinearConfig

    @classmethod
    def from_float(cls, mod: nn.Linear, qconfig: QLinearConfig) -> MXInferenceLinear:
        """Return a quantized copy of a layer. The layer does not change; the two share their bias.

        Raises:
            MXError: for a weight that is already quantized, or of another dtype than float32, float16 or bfloat16.
        """
        if not isinstance(mod, nn.Linear) or not isinstance(qconfig, QLinearConfig):
            raise MXError(
                f"MXInferenceLinear.from_float takes an nn.Linear and a QLinearConfig, not {type(mod).__name__} and "
                f"{type(qconfig).__name__}"
            )
        new = cls(mod.in_features, mod.out_features, bias=False, device="meta")
        new.qconfig, new.bias = qconfig, mod.bias
        weight = mx_tensor.MXTensor.to_mx(mod.weight.detach(), qconfig.weights_config.spec, axis=-1)
        new.weight = nn.Parameter(weight, requires_grad=False)
        return new.train(mod.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) of the weight's dtype -> (..., out)."""
        if not isinstance(self.weight, MXTensor):  # assigned by load_state_dict or tied to another layer
            raise MXError("the weight of this MXInferenceLinear is a plain tensor now: quantize the float model again")
        x = fake_quantize_mx(x, self.qconfig.activations_config.spec, axis=-1)
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        config = self.qconfig
        return (
            f"{super().extra_repr()}, weight={config.weights_config.spec}, activation={config.activations_config.spec}"
        )
