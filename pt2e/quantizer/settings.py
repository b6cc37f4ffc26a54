"""The settings of a quantizer: its setters, recipes and dictionaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.matching import MATCHERS
from pt2mx.pt2e.quantizer.operators import OPERANDS, OPT_IN, names_of

if TYPE_CHECKING:
    from typing_extensions import Self

Config = MXQuantizationConfig | None

#: what `to_dict` calls a kind of setting, as torch.ao's `QConfigMapping` does -> the setting kinds
_GROUPS = {
    "": ("global",),
    "object_type": ("operator_type", "module_type"),
    "module_name_regex": ("module_name_regex",),
    "module_name": ("module_name",),
    recipe.ORDER: (recipe.ORDER,),
    **{kind: (kind,) for kind in recipe.ENDS},
}


class QuantizerSettings:
    """Which config goes where. Each setter takes a config, or None for "leave in high precision", and returns the
    quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self._filter: Callable[[Node], bool] | None = None
        self._global: Config = None
        #: "first" or "last" -> count -> config
        self._ends: dict[str, dict[int, Config]] = {kind: {} for kind in recipe.ENDS}
        #: setting kind -> key -> config, in order of precedence
        self._settings: dict[str, dict[object, Config]] = {kind: {} for kind in MATCHERS}

    def set_global(self, config: Config) -> Self:
        """For every operator that no other setting matches."""
        self._global = _checked(config)
        return self

    def set_first(self, config: Config, count: int = 1) -> Self:
        """For the first `count` operators, in the order of execution, that the other settings quantize. Where several
        counts were set, the smallest that covers an operator wins."""
        return self._set_end("first", count, config)

    def set_last(self, config: Config, count: int = 1) -> Self:
        """For the last `count` operators that the other settings quantize, as `set_first` has it."""
        return self._set_end("last", count, config)

    def set_module_name(self, name: str, config: Config) -> Self:
        """For the operators inside the module of this qualified name, such as "encoder.layer.0.q_proj"."""
        return self._set("module_name", name, config)

    def set_module_name_regex(self, pattern: str, config: Config) -> Self:
        """For the operators inside the modules whose whole qualified name the pattern matches."""
        try:
            re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise MXError(f"{pattern!r} is no regular expression: {error}") from None
        return self._set("module_name_regex", pattern, config)

    def set_module_type(self, module_type: type | str, config: Config) -> Self:
        """For the operators inside modules of this class: the class, its qualified name, or its bare name."""
        return self._set("module_type", _type_name(module_type), config)

    def set_operator_type(self, operator: torch._ops.OpOverload | str, config: Config) -> Self:
        """For one operator with its overloads, or for one overload: `torch.ops.aten.bmm.default`, `torch.ops.aten.bmm`
        or "aten.bmm". Elementwise `aten.add` and `aten.mul` are quantized only where this names them.
        """
        name, allowed = _operator_name(operator), _operator_names()
        if name not in allowed:
            raise MXError(f"operator {name!r} cannot be quantized: {nearest(name, sorted(allowed))}")
        return self._set("operator_type", name, config)

    def set_object_type(self, object_type: object, config: Config) -> Self:
        """`set_module_type` of a class or its name, `set_operator_type` of an operator, of a function of torch that is
        named like it (`torch.matmul`, `torch.nn.functional.linear`), or of its name ("aten.bmm", "bmm")."""
        kind, name = _object_type(object_type)
        return self.set_operator_type(name, config) if kind == "operator_type" else self.set_module_type(name, config)

    def set_module_name_object_type_order(
        self, module_name: str, object_type: object, index: int, config: Config
    ) -> Self:
        """For one of the calls that a module makes, counted from 0 in the order of execution among those of its type.

        Args:
            module_name: the qualified name of the module that makes the call, "" for the model: of an operator the
                innermost module around it, of a module the one above it by its name.
            object_type: as `set_object_type` takes it: an operator, or a class of modules that `module_name` calls.
        """
        if not isinstance(module_name, str):
            raise MXError(f"{recipe.ORDER}: the module {module_name!r} must be a qualified name, or '' for the model")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise MXError(f"{recipe.ORDER}: index={index!r} must be an integer of at least 0")
        self._settings[recipe.ORDER][module_name, _object_type(object_type)[1], index] = _checked(config)
        return self

    def set_filter_function(self, function: Callable[[Node], bool] | None) -> Self:
        """Only operators for whose node `function(node)` is true are quantized; None takes the filter away."""
        if function is not None and not callable(function):
            raise MXError(f"the filter must be a function of a node that returns a bool, not {function!r}")
        self._filter = function
        return self

    @classmethod
    def from_recipe(cls, path_or_name: object) -> Self:
        """The quantizer that a YAML recipe describes: a path, or the name of one of `pt2mx.configs`.

        Raises:
            MXError: for what is wrong in it, also for two keys that mean one, as `aten.bmm` and `aten.bmm.default`.
        """
        quantizer = cls()
        for kind, key, config in recipe.read(path_or_name):
            before = quantizer._count()
            try:
                quantizer._apply(kind, key, config)
                if key is not None and quantizer._count() == before:
                    raise MXError(f"{kind} {key!r} says again what an earlier key says: keep one of them")
            except MXError as error:
                raise MXError(f"recipe {path_or_name}: {error}") from None
        return quantizer

    def to_recipe(self, path: object = None) -> str:
        """The YAML recipe of this quantizer, also written to `path` if one is given."""
        return recipe.write(self._all("a recipe"), path)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """The quantizer of a dictionary such as `to_dict` makes, whose configs may also be `MXQuantizationConfig`s and
        its types what `set_object_type` takes.

        Raises:
            MXError: for an unknown key, or settings of another form.
        """
        if not isinstance(settings, Mapping):
            raise MXError(f"expected a dictionary of settings, not {settings!r}")
        quantizer = cls()
        for group, entries in settings.items():
            if group not in _GROUPS:
                raise MXError(f"unknown key {group!r} of settings: {nearest(group, _GROUPS)}")
            for *key, config in [(entries,)] if group == "" else _rows(group, entries):
                config = MXQuantizationConfig.from_dict(config) if isinstance(config, Mapping) else config
                if group == "object_type":
                    quantizer.set_object_type(*key, config)
                else:
                    key = tuple(key) if group == recipe.ORDER else key[0] if key else None
                    quantizer._apply(_GROUPS[group][0], key, config)
        return quantizer

    def to_dict(self) -> dict[str, object]:
        """The settings under the keys of torch.ao's `QConfigMapping.to_dict`, and "first" and "last": the global config
        under "", lists of (key, ..., config) under the others. Configs are plain dictionaries or None."""
        plain: dict[str, object] = {group: [] for group in _GROUPS} | {"": None}
        group_of = {kind: group for group, kinds in _GROUPS.items() for kind in kinds}
        for kind, key, config in self._all("a dictionary"):
            values = None if config is None else config.to_dict()
            if kind == "global":
                plain[""] = values
            else:
                plain[group_of[kind]].append((*(key if isinstance(key, tuple) else (key,)), values))
        return plain

    def _all(self, form: str) -> list[recipe.Setting]:
        if self._filter is not None:
            raise MXError(f"a filter function cannot be written to {form}: use module names or patterns instead")
        settings = [("global", None, self._global)] if self._global is not None else []
        kinds = {**self._ends, **self._settings}
        return settings + [(kind, key, config) for kind, keys in kinds.items() for key, config in keys.items()]

    def _count(self) -> int:
        """How many settings there are, beside the global one."""
        return sum(map(len, (*self._ends.values(), *self._settings.values())))

    def _apply(self, kind: str, key: object, config: Config) -> None:
        """Make a setting, by its kind and key."""
        setter = getattr(self, f"set_{kind}")
        if kind in recipe.ENDS:
            setter(config, key)
        else:
            setter(*(key if isinstance(key, tuple) else () if key is None else (key,)), config)

    def _set(self, kind: str, key: str, config: Config) -> Self:
        if not isinstance(key, str) or not key:
            raise MXError(f"{kind} must be a string that is not empty, not {key!r}")
        self._settings[kind][key] = _checked(config)
        return self

    def _set_end(self, kind: str, count: int, config: Config) -> Self:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise MXError(f"{kind}: count={count!r} must be an integer of at least 1")
        self._ends[kind][count] = _checked(config)
        return self


def _checked(config: Config) -> Config:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(
            f"expected an MXQuantizationConfig or None, not {config!r}: make one with "
            "get_default_mx_quantization_config(...)"
        )
    return config


def _rows(group: str, entries: object) -> list[tuple]:
    length = 4 if group == recipe.ORDER else 2
    if isinstance(entries, list | tuple) and all(isinstance(e, list | tuple) and len(e) == length for e in entries):
        return list(entries)
    raise MXError(f"settings under {group!r} must be a list of ({'key, ' * (length - 1)}config), not {entries!r}")


def _operator_names() -> set[str]:
    return {name for overload in (*OPERANDS, *OPT_IN) for name in names_of(overload)}


def _operator_name(operator: object) -> str:
    return str(operator).removeprefix("torch.ops.").removesuffix(".default")


def _type_name(module_type: object) -> object:
    if isinstance(module_type, type):
        return f"{module_type.__module__}.{module_type.__qualname__}"
    return module_type


def _object_type(object_type: object) -> tuple[str, str]:
    """The setting kind and the key by which `set_object_type` means an object.

    Raises:
        MXError: for what is neither an operator nor a class.
    """
    if isinstance(object_type, type):
        return "module_type", _type_name(object_type)
    name = _operator_name(object_type)
    if callable(object_type) and not isinstance(object_type, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = getattr(object_type, "__name__", name)
    found = next((n for n in (name, f"aten.{name}") if n in _operator_names()), None)
    if found is not None:
        return "operator_type", found
    if isinstance(object_type, str) and object_type and not name.startswith("aten."):
        return "module_type", object_type
    raise MXError(
        f"{object_type!r} is neither a class of modules nor an operator that can be quantized: "
        f"{nearest(name, sorted(_operator_names()))}"
    )
