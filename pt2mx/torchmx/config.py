"""Configs that choose a format for each tensor. Each converts to a dict of plain values and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pt2mx.errors import MXError, nearest
from pt2mx.spec import MXSpec, parse
from pt2mx.torchmx.dtypes import DType, dtype_of

_C = TypeVar("_C", bound="_Config")


@dataclass(frozen=True)
class _Config:
    """A frozen dataclass. A field whose metadata names a `config` class holds an instance of it, or None if that is the
    default."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            kind, value = f.metadata.get("config"), getattr(self, f.name)
            if kind and not isinstance(value, kind) and (value is not None or f.default is not None):
                raise MXError(f"{type(self).__name__}: {f.name} must be of type {kind.__name__}, not {value!r}")

    @classmethod
    def load_from_dict(cls: type[_C], config_dict: Mapping[str, Any]) -> _C:
        """Return the config that `to_dict` converted to `config_dict`.

        Args:
            config_dict: field -> plain value, or the dict of a config.

        Returns:
            The config.

        Raises:
            MXError: for a missing or unknown key, or a value that the class does not take.
        """
        if not isinstance(config_dict, Mapping):
            raise MXError(f"{cls.__name__} is loaded from a dict, not from {config_dict!r}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in config_dict:
            if key not in fields:
                raise MXError(f"{cls.__name__} has no field {key!r}: {nearest(key, fields)}")
        missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in config_dict]
        if missing:
            raise MXError(f"{cls.__name__}: {', '.join(missing)} missing in {dict(config_dict)}")
        values = dict(config_dict)
        for key, value in values.items():
            kind = fields[key].metadata.get("config")
            if kind and value is not None:
                values[key] = kind.load_from_dict(value)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None.

        Returns:
            field -> plain value, or the dict of a config.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v.to_dict() if isinstance(v, _Config) else v for k, v in values.items() if v is not None}


@dataclass(frozen=True)
class MXConfig(_Config):
    """The format of one tensor, after TorchMX's `MXConfig`.

    Args:
        elem_dtype_name: `"float8_e4m3"`, `"float6_e3m2"`, ..., `"int8"` or any other spelling that `pt2mx.parse` takes.
        block_size: values that share a scale; by default the number in the spelling, or 32.

    Raises:
        MXError: for an unknown spelling, a block size below 1, a scale that is not E8M0.

    Example:
        >>> from pt2mx import torchmx
        >>> config = torchmx.MXConfig("float6_e3m2", block_size=16)
        >>> config.to_dict()
        {'elem_dtype_name': 'float6_e3m2', 'block_size': 16}
        >>> torchmx.MXConfig.load_from_dict(config.to_dict()) == config
        True
    """

    elem_dtype_name: str
    block_size: int | None = None

    if TYPE_CHECKING:  # any spelling of an element becomes a string

        def __init__(self, elem_dtype_name: object, block_size: int | None = None) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {} if self.block_size is None else {"block_size": self.block_size}
        spec = parse(self.elem_dtype_name, **options)
        spec.check_plain_scale()
        if not isinstance(self.elem_dtype_name, str):
            object.__setattr__(self, "elem_dtype_name", str(spec))
        object.__setattr__(self, "block_size", spec.block_size)

    @property
    def spec(self) -> MXSpec:
        """Return the config as a spec; the caller sets its axis."""
        return parse(self.elem_dtype_name, block_size=self.block_size)

    @property
    def elem_dtype(self) -> DType:
        """The element format."""
        return dtype_of(self.spec.element)


@dataclass(frozen=True)
class QLinearConfig(_Config):
    """The formats of a linear layer, both along the dimension that it reduces, after TorchMX's `QLinearConfig`.

    Args:
        weights_config: of the weight, quantized once.
        activations_config: of the input, quantized at each call.

    Raises:
        MXError: for another object than an `MXConfig`.

    Example:
        >>> from pt2mx import torchmx
        >>> qconfig = torchmx.QLinearConfig(torchmx.MXConfig("float4_e2m1"), torchmx.MXConfig("float8_e4m3"))
        >>> qconfig.to_dict()["weights_config"]
        {'elem_dtype_name': 'float4_e2m1', 'block_size': 32}
    """

    weights_config: MXConfig = field(metadata={"config": MXConfig})
    activations_config: MXConfig = field(metadata={"config": MXConfig})


@dataclass(frozen=True)
class QAttentionConfig(_Config):
    """The formats of an attention layer, after TorchMX's `QAttentionConfig`.

    Args:
        projection_config: of the query, key, value and output projections.
        query_config, key_config: of queries and keys in their matmul, along the head dimension.
        value_config, attention_weights_config: of values and of the attention weights (after softmax and dropout) in
            their matmul, along the key length.

    Raises:
        MXError: for objects of other classes, and for some but not all of the last four.

    Example:
        >>> from pt2mx import torchmx
        >>> fp8 = torchmx.MXConfig("float8_e4m3")
        >>> torchmx.QAttentionConfig(torchmx.QLinearConfig(fp8, fp8)).is_qkv_quantization_enabled
        False
        >>> torchmx.QAttentionConfig(torchmx.QLinearConfig(fp8, fp8), fp8, fp8, fp8, fp8).is_qkv_quantization_enabled
        True
    """

    projection_config: QLinearConfig = field(metadata={"config": QLinearConfig})
    query_config: MXConfig | None = field(default=None, metadata={"config": MXConfig})
    key_config: MXConfig | None = field(default=None, metadata={"config": MXConfig})
    value_config: MXConfig | None = field(default=None, metadata={"config": MXConfig})
    attention_weights_config: MXConfig | None = field(default=None, metadata={"config": MXConfig})

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("query_config", "key_config", "value_config", "attention_weights_config")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise MXError(f"QAttentionConfig: give all of {', '.join(names)} or none; missing: {', '.join(missing)}")

    @property
    def is_qkv_quantization_enabled(self) -> bool:
        """Return whether the two matmuls of attention are quantized."""
        return self.query_config is not None
