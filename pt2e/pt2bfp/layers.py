"""Layers of eager models: with observers, and with codes and scales as parameters.

They quantize the same operands, along the same dimensions, as the operators of exported graphs.
"""

from __future__ import annotations

import copy
import inspect
import re
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pt2mx.errors import MXError
from pt2mx.functional import dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.observe.qspec import mx_qscheme
from pt2mx.pt2e.pt2bfp.specs import BFPConfig
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import Operand, convolution_operands, fixed_operands, reduced_axis
from pt2mx.spec import MXSpec

#: type of a layer -> the operator that it calls
_OPERATORS: dict[type[nn.Module], str] = {
    nn.Embedding: "aten.embedding",
    nn.EmbeddingBag: "aten.embedding_bag",
    nn.LSTMCell: "aten.lstm_cell",
    nn.GRUCell: "aten.gru_cell",
    nn.RNNCell: "aten.rnn_tanh_cell",
}


#: operands of recurrent layers. Their parameters have the names of a cell's, with a suffix. The hidden state is not
#: quantized
_RECURRENT = (*fixed_operands("aten.gru_cell"), Operand("weight_hr", 2, "weight", -1))

_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d

#: type of a layer -> its operands
LAYERS: dict[type[nn.Module], tuple[Operand, ...]] = {
    nn.Linear: fixed_operands("aten.linear"),
    **{kind: convolution_operands(i, 1) for i, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1)},
    **{kind: convolution_operands(i, 0) for i, kind in enumerate(_TRANSPOSED, 1)},
    **{kind: fixed_operands(operator) for kind, operator in _OPERATORS.items()},
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _RECURRENT),
}
_INPUTS = ("input", "hidden")
#: the suffix that a recurrent layer adds to the name of a cell's parameter
_SUFFIX = re.compile(r"_l\d+(_reverse)?$")


class _Layer(nn.Module, ABC):
    """A layer that quantizes its inputs and parameters at each call. It has the attributes of the original layer."""

    description: str

    def __init__(self, layer: nn.Module, parameters: dict[str, nn.Parameter | None], training: bool) -> None:
        super().__init__()
        self._skeleton = (layer,)  # a tuple hides it from the submodules; it has no tensors
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.train(training)

    @property
    def kind(self) -> type[nn.Module]:
        """Return the type of the original layer."""
        return type(self._skeleton[0])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            if name in self._skeleton[0]._parameters:
                raise AttributeError(
                    f"{self} has no {name}, but codes and scales, {name}_data and {name}_scale; give a layer whose "
                    f"{name} the model reads the qconfig None"
                ) from None
            return getattr(self._skeleton[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (layer,) = self._skeleton
        layer.training = self.training
        _forget_weights(layer)
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        inputs = list(bound.args)
        for operand in LAYERS[self.kind]:
            if operand.name in _INPUTS and len(inputs) > operand.position and inputs[operand.position] is not None:
                inputs[operand.position] = self._computed_input(operand, inputs[operand.position])
        y = torch.func.functional_call(layer, self.computed_parameters(), tuple(inputs), bound.kwargs)
        _forget_weights(layer)
        return self.computed_output(y)

    def _computed_input(self, operand: Operand, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=self.computed_input(operand.name, value.data))
        if operand.item is None:
            return self.computed_input(operand.name, value)
        return tuple(self.computed_input(operand.name, x) if i == operand.item else x for i, x in enumerate(value))

    @abstractmethod
    def computed_input(self, name: str, x: Tensor) -> Tensor:
        """Return an input as the layer computes with it."""

    @abstractmethod
    def computed_parameters(self) -> dict[str, Tensor]:
        """Return the parameters, by name, as the layer computes with them."""

    def computed_output(self, y: Any) -> Any:
        return y

    def extra_repr(self) -> str:
        return self.description


def _operands_of(layer: nn.Module) -> tuple[Operand, ...]:
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return LAYERS[type(layer)]
    weight = layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size
    return convolution_operands(len(layer.kernel_size), reduced_axis(weight, is_grouped=layer.groups > 1))


def _without_parameters(layer: nn.Module) -> nn.Module:
    layer = copy.copy(layer)
    layer._parameters = dict.fromkeys(layer._parameters)
    _forget_weights(layer)
    return layer


def _forget_weights(layer: nn.Module) -> None:
    """Clear the list in which a recurrent layer also keeps its parameters."""
    if isinstance(layer, nn.RNNBase):
        count = len(layer._flat_weights_names)
        vars(layer).update(_flat_weights=[None] * count, _flat_weight_refs=[_nothing] * count)


def _nothing() -> None:
    """Return None, as a weak reference to a deleted weight does."""


class ObservedLayer(_Layer):
    """A layer with an observer for each quantized input and parameter, as `prepare` makes it. Parameters keep their
    names.

    Args:
        layer: a layer of a type in `LAYERS`. The new layer shares its parameters.
        config: the config of its operands.

    Raises:
        MXError: for another type, for a layer that computes its weight from parameters with other names (old weight
            norms), and for affine quantization.
    """

    def __init__(self, layer: nn.Module, config: MXQuantizationConfig) -> None:
        if type(layer) not in LAYERS:
            allowed = ", ".join(kind.__name__ for kind in LAYERS)
            raise MXError(f"a layer of the type {type(layer).__name__} is not quantized: allowed are {allowed}")
        if isinstance(config, BFPConfig) and config.affine:
            roles = ", ".join(role for role, _ in config.affine)
            raise MXError(f"{roles}: eager modules have block formats alone; use prepare_fx for affine quantization")
        super().__init__(_without_parameters(layer), layer._parameters, layer.training)
        self.qconfig, self.description = config, str(layer)
        self.observers = nn.ModuleDict()
        operands = {operand.name: operand for operand in _operands_of(layer)}
        for name in _INPUTS:
            if name in operands:
                self._observe(name, operands[name])
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            operand = operands.get(_SUFFIX.sub("", name))
            if operand is None:
                raise MXError(
                    f"{layer} computes its weight from {name}: remove the reparametrization, use prepare_fx, or give "
                    "the layer the qconfig None"
                )
            self._observe(name, operand, parameter)
        self._observe("output", Operand("output", -1, "output", -1))

    def _observe(self, name: str, operand: Operand, tensor: Tensor | None = None) -> None:
        spec = self.qconfig.spec_of(operand.name, operand.role)
        if spec is not None:
            qscheme = mx_qscheme(spec.replace(axis=operand.axis), self.qconfig.ste)
            self.observers[name] = self.qconfig.module_of(operand.role)(qscheme=qscheme)
            self.observers[name].observe_once = tensor is not None  # type: ignore[assignment]
            if tensor is not None:
                self.observers[name].to(tensor.device)

    def computed_input(self, name: str, x: Tensor) -> Tensor:
        return self.observers[name](x) if name in self.observers else x

    def computed_parameters(self) -> dict[str, Tensor]:
        return {
            name: self.observers[name](parameter) if name in self.observers else parameter
            for name, parameter in self.named_parameters(recurse=False, remove_duplicate=False)
        }

    def computed_output(self, y: Any) -> Any:
        return self.observers["output"](y) if "output" in self.observers and isinstance(y, Tensor) else y

    def restored(self) -> nn.Module:
        """Return the float layer."""
        layer = copy.copy(self._skeleton[0])
        layer._parameters = {}
        for name, parameter in self._parameters.items():
            layer.register_parameter(name, parameter)
        if isinstance(layer, nn.RNNBase):
            layer._init_flat_weights()
        return layer.train(self.training)


class QuantizedLayer(_Layer):
    """A layer with codes and scales, `<parameter>_data` and `<parameter>_scale` as in a converted graph.

    It dequantizes them at each call, and fake quantizes its inputs. `convert` makes it.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8)).eval()
        >>> model.qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> converted = pt2bfp.convert(pt2bfp.prepare(model))
        >>> {name: tuple(buffer.shape) for name, buffer in converted.state_dict().items() if "weight" in name}
        {'0.weight_scale': (8, 1), '0.weight_data': (8, 64)}
    """

    _values: Tensor

    def __init__(self, observed: ObservedLayer) -> None:
        super().__init__(*observed._skeleton, observed._parameters, observed.training)
        self.description = observed.description
        observers = {n: m.spec for n, m in observed.observers.items() if isinstance(m, MXObserver)}
        self.input_specs = {name: spec for name, spec in observers.items() if name not in observed._parameters}
        self.parameter_specs: dict[str, tuple[MXSpec, int]] = {}
        for name, spec in observers.items():
            parameter = observed._parameters.get(name)
            if parameter is not None:
                scale, data = quantize_mx(parameter.detach(), spec)
                self.parameter_specs[name] = spec, parameter.shape[spec.axis]
                # it keeps the dtype of the values, which `half()` and similar methods change
                self.register_buffer("_values", parameter.new_empty(0).detach(), persistent=False)
                del self._parameters[name]
                self.register_buffer(f"{name}_scale", scale)
                self.register_buffer(f"{name}_data", data)
        self.requires_grad_(False)

    @classmethod
    def from_float(cls, module: nn.Module) -> QuantizedLayer:
        """Quantize a layer, as the classes in torch.ao's mappings do.

        Args:
            module: an `ObservedLayer`, or a layer with a `qconfig`.

        Returns:
            The quantized layer.

        Raises:
            MXError: as `ObservedLayer`.
        """
        return cls(module if isinstance(module, ObservedLayer) else ObservedLayer(module, module.qconfig))  # type: ignore[arg-type]

    def computed_input(self, name: str, x: Tensor) -> Tensor:
        return fake_quantize_mx(x, self.input_specs[name]) if name in self.input_specs else x

    def computed_parameters(self) -> dict[str, Tensor]:
        values: dict[str, Tensor] = dict(self.named_parameters(recurse=False, remove_duplicate=False))
        for name, (spec, length) in self.parameter_specs.items():
            data, scale = getattr(self, f"{name}_data"), getattr(self, f"{name}_scale")
            values[name] = dequantize_mx(data, scale, spec, target_dtype=self._values.dtype, length=length)
        return values

    def computed_output(self, y: Any) -> Any:
        spec = self.input_specs.get("output")
        return y if spec is None or not isinstance(y, Tensor) else fake_quantize_mx(y, spec)
