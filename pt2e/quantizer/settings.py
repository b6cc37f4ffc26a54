"""The setters of a quantizer, and the settings that they store."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.matching import MATCHERS, object_key, operator_key, type_key
from pt2mx.pt2e.quantizer.model_settings import ModelSettings
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Config = MXQuantizationConfig | None


class QuantizerSettings(ModelSettings):
    """The configs of a quantizer, and the operators to which each applies.

    Each setter takes a config, or None for "leave in high precision", and returns the quantizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._global: Config = None
        #: "first" or "last" -> count -> config
        self._ends: dict[str, dict[int, Config]] = {kind: {} for kind in recipe.ENDS}
        #: setting kind -> key -> config, in order of precedence
        self._settings: dict[str, dict[Any, Config]] = {kind: {} for kind in MATCHERS}

    def with_weights(self, spec: MXSpec) -> Self:
        """Change the format of the weights that the configs quantize, as for an anchor of slices.

        Args:
            spec: the format.

        Returns:
            A copy of the quantizer.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only").with_weights(pt2mx.parse("mxint8"))
            >>> quantizer.to_dict()[""]
            {'weight': 'mxint8{32}'}
        """

        def changed(configs: dict[Any, Config]) -> dict[Any, Config]:
            return {key: one and (replace(one, weight=spec) if one.weight else one) for key, one in configs.items()}

        copied = copy.copy(self)
        copied._global = changed({None: self._global})[None]
        copied._ends = {kind: changed(configs) for kind, configs in self._ends.items()}
        copied._settings = {kind: changed(configs) for kind, configs in self._settings.items()}
        return copied

    def set_global(self, config: Config) -> Self:
        """Set the config of every operator that no other setting matches.

        Args:
            config: None leaves these operators in high precision, as without this setting.

        Returns:
            The quantizer.

        Raises:
            MXError: for another object, as all setters.

        Example:
            >>> import pt2mx
            >>> config = pt2mx.MXQuantizationConfig(weight="mxfp4", activation="mxfp8")
            >>> print(pt2mx.MXQuantizer().set_global(config).to_recipe(), end="")
            global:
              activation: mxfp8_e4m3{32}
              weight: mxfp4_e2m1{32}
        """
        self._global = checked_config(config)
        return self

    def set_first(self, config: Config, count: int = 1) -> Self:
        """Set the config of the first operators, in the order of execution, that the other settings quantize.

        Args:
            config: None leaves them in high precision.
            count: number of operators. Where several counts were set, the smallest that covers an operator wins.

        Returns:
            The quantizer.

        Raises:
            MXError: for a count below 1.
        """
        return self._set_end("first", count, config)

    def set_last(self, config: Config, count: int = 1) -> Self:
        """Set the config of the last operators that the other settings quantize.

        Args:
            config, count: as in `set_first`.

        Returns:
            The quantizer.

        Raises:
            MXError: for a count below 1.
        """
        return self._set_end("last", count, config)

    def set_small_weights(self, config: Config, values: int) -> Self:
        """Set the config of the operators with a small weight, such as the first layers of a convolutional network and
        its depthwise convolutions. In 4 bits they lose the most accuracy, and in 8 bits they add few bytes.

        Args:
            config: None leaves them in high precision.
            values: the largest number of values of a small weight. If several were set, the smallest that covers a
                weight wins.

        Returns:
            The quantizer.

        Raises:
            MXError: for a number below 1.

        Example:
            >>> import pt2mx
            >>> fp4, int8 = (pt2mx.MXQuantizationConfig(weight=name) for name in ("mxfp4", "mxint8"))
            >>> print(pt2mx.MXQuantizer().set_global(fp4).set_small_weights(int8, 32768).to_recipe(), end="")
            global:
              weight: mxfp4_e2m1{32}
            small_weights:
              32768:
                weight: mxint8{32}
        """
        self._settings[recipe.SMALL_WEIGHTS][_checked(recipe.SMALL_WEIGHTS, "values", values)] = checked_config(config)
        return self

    def set_module_name(self, name: str, config: Config) -> Self:
        """Set the config of the operators inside one module.

        Args:
            name: its qualified name, such as "encoder.layer.0.q_proj".
            config: None leaves them in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for a name that is empty or no string.
        """
        return self._set("module_name", name, config)

    def set_module_name_regex(self, pattern: str, config: Config) -> Self:
        """Set the config of the operators inside the modules whose whole qualified name a pattern matches.

        Args:
            pattern: a regular expression of Python's `re`, such as `r"encoder\\.layer\\.\\d+\\.mlp"`.
            config: None leaves them in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for an invalid regular expression.
        """
        try:
            re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise MXError(f"{pattern!r} is no regular expression: {error}") from None
        return self._set("module_name_regex", pattern, config)

    def set_module_type(self, module_type: type | str, config: Config) -> Self:
        """Set the config of the operators inside modules of a class.

        Args:
            module_type: the class, its qualified name, or its bare name.
            config: None leaves them in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for a name that is empty or no string.
        """
        return self._set("module_type", type_key(module_type) if isinstance(module_type, type) else module_type, config)

    def set_operator_type(self, operator: torch._ops.OpOverload | str, config: Config) -> Self:
        """Set the config of one operator with its overloads, or of one overload.

        Elementwise `aten.add` and `aten.mul` are quantized only where such a setting names them.

        Args:
            operator: `torch.ops.aten.bmm.default`, `torch.ops.aten.bmm` or "aten.bmm".
            config: None leaves it in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for an operator that cannot be quantized, naming the nearest one that can.
        """
        return self._set("operator_type", operator_key(operator), config)

    def set_object_type(self, object_type: object, config: Config) -> Self:
        """Set the config of a class of modules or of an operator, as torch.ao's `QConfigMapping.set_object_type` does.

        Args:
            object_type: a class or its name, as in `set_module_type`; or an operator, a function of torch with its name
                (`torch.matmul`, `torch.nn.functional.linear`), or its name ("aten.bmm", "bmm"), as in
                `set_operator_type`.
            config: None leaves them in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for another object, and for an operator that cannot be quantized.
        """
        kind, name = object_key(object_type)
        return self.set_operator_type(name, config) if kind == "operator_type" else self.set_module_type(name, config)

    def set_module_name_object_type_order(
        self, module_name: str, object_type: object, index: int, config: Config
    ) -> Self:
        """Set the config of one of the calls that a module makes, as torch.ao's `QConfigMapping` does.

        Args:
            module_name: the qualified name of the module that makes the call, "" for the model: the innermost module
                around an operator, or the parent of a module.
            object_type: an operator, or a class of modules that `module_name` calls, as in `set_object_type`.
            index: the number of the call among the calls of that type, from 0, in execution order.
            config: None leaves it in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for a name that is no string, a negative index, or an unknown object type.
        """
        if not isinstance(module_name, str):
            raise MXError(f"{recipe.ORDER}: the module {module_name!r} must be a qualified name, or '' for the model")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise MXError(f"{recipe.ORDER}: index={index!r} must be an integer of at least 0")
        self._settings[recipe.ORDER][module_name, object_key(object_type)[1], index] = checked_config(config)
        return self

    def _by_kind(self) -> dict[str, dict[Any, Config]]:
        """Return all settings except the global one: kind -> key -> config."""
        return {**self._ends, **self._settings}

    def _set(self, kind: str, key: object, config: Config) -> Self:
        if not isinstance(key, str) or not key:
            raise MXError(f"{kind} must be a string that is not empty, not {key!r}")
        self._settings[kind][key] = checked_config(config)
        return self

    def _set_end(self, kind: str, count: int, config: Config) -> Self:
        self._ends[kind][_checked(kind, "count", count)] = checked_config(config)
        return self


def _checked(kind: str, name: str, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise MXError(f"{kind}: {name}={count!r} must be an integer of at least 1")
    return count


def checked_config(config: object) -> Config:
    """Return `config`, checked.

    Raises:
        MXError: for another object.
    """
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(
            f"expected an MXQuantizationConfig or None, not {config!r}: make one with "
            "get_default_mx_quantization_config(...)"
        )
    return config
