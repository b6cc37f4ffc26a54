"""Convert the settings of a quantizer to and from recipes and dictionaries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from textwrap import indent
from typing import TYPE_CHECKING, Any, cast

from pt2mx.algorithms.options import chosen_algorithms, plain_algorithms
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.settings import Config, QuantizerSettings, checked_config

if TYPE_CHECKING:
    from typing_extensions import Self

#: key of `to_dict`, as in torch.ao's `QConfigMapping` -> setting kinds
_GROUPS = {
    "": ("global",),
    "object_type": ("operator_type", "module_type"),
    "module_name_regex": ("module_name_regex",),
    "module_name": ("module_name",),
    recipe.ORDER: (recipe.ORDER,),
    **{kind: (kind,) for kind in recipe.COUNTS},
}


class StoredSettings(QuantizerSettings):
    """Settings that can be stored as recipes and dictionaries."""

    @classmethod
    def from_recipe(cls, path_or_name: str | os.PathLike[str]) -> Self:
        """Make a quantizer from a YAML recipe.

        Args:
            path_or_name: the path of a recipe; the name of one of `pt2mx.configs`, such as "mxfp8"; or a format that
                `pt2mx.parse` takes, such as "fp6_e3m2", for weights and activations alike.

        Returns:
            A new quantizer.

        Raises:
            MXError: for any mistake in it, such as two keys with one meaning (`aten.bmm` and `aten.bmm.default`).

        Example:
            >>> import pt2mx
            >>> pt2mx.MXQuantizer.from_recipe("mxfp4").to_dict()[""]
            {'activation': 'mxfp4_e2m1{32}(even,even)', 'weight': 'mxfp4_e2m1{32}(even,even)'}
        """
        quantizer = cls()
        settings, quantizer._algorithms, quantizer._kv_cache = recipe.read(path_or_name)
        for kind, key, config in settings:
            before = quantizer._count()
            try:
                quantizer._apply(kind, key, config)
                if key is not None and quantizer._count() == before:
                    raise MXError(f"{kind} {key!r} says again what an earlier key says: keep one of them")
            except MXError as error:
                raise MXError(f"recipe {path_or_name}: {error}") from None
        return quantizer

    def to_recipe(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the settings as a YAML recipe.

        Args:
            path: of the file; None: no file is written.

        Returns:
            The YAML, which `from_recipe` reads.

        Raises:
            MXError: without any setting, with a filter function (which a recipe cannot store), and where no file can be
                written at `path`.

        Example:
            >>> import pt2mx
            >>> int8 = pt2mx.MXQuantizationConfig(weight="mxint8")
            >>> print(pt2mx.MXQuantizer().set_module_name("head", int8).set_last(None).to_recipe(), end="")
            last:
              1: null
            module_name:
              head:
                weight: mxint8{32}
        """
        return recipe.write(recipe.Recipe(self._all("a recipe"), self.algorithms, self.kv_cache), path)

    def __repr__(self) -> str:
        """Return the settings as the lines of a recipe, and the name of a filter function.

        Example:
            >>> import pt2mx
            >>> pt2mx.MXQuantizer.from_recipe("mxfp4")
            MXQuantizer(
              global:
                activation: mxfp4_e2m1{32}(even,even)
                weight: mxfp4_e2m1{32}(even,even)
            )
        """
        text = recipe.yaml_of(recipe.Recipe(self._every_setting(), self.algorithms, self.kv_cache))
        if self._filter is not None:
            text += f"filter_function: {getattr(self._filter, '__qualname__', self._filter)}\n"
        name = type(self).__name__
        return f"{name}(\n{indent(text, '  ')})" if text else f"{name}()"

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """Make a quantizer from a dictionary such as `to_dict` returns.

        Args:
            settings: as `to_dict` returns it. Configs may also be `MXQuantizationConfig`s, and types anything that
                `set_object_type` takes.

        Returns:
            A new quantizer.

        Raises:
            MXError: for an unknown key, and for malformed settings.

        Example:
            >>> import torch, pt2mx
            >>> settings = {"": {"weight": "mxfp4"}, "object_type": [(torch.nn.Embedding, None)]}
            >>> pt2mx.MXQuantizer.from_dict(settings).to_dict()["object_type"]
            [('torch.nn.modules.sparse.Embedding', None)]
        """
        if not isinstance(settings, Mapping):
            raise MXError(f"expected a dictionary of settings, not {settings!r}")
        quantizer = cls()
        for group, entries in settings.items():
            if group == recipe.ALGORITHMS:
                quantizer._algorithms = None if entries is None else chosen_algorithms(entries)
                continue
            if group == recipe.KV_CACHE:
                quantizer.set_kv_cache(cast("str | None", entries))
                continue
            if group not in _GROUPS:
                known = [*_GROUPS, recipe.ALGORITHMS, recipe.KV_CACHE]
                raise MXError(f"unknown key {group!r} of settings: {nearest(group, known)}")
            for key, value in [(None, entries)] if group == "" else _rows(group, entries):
                config = MXQuantizationConfig.from_dict(value) if isinstance(value, Mapping) else checked_config(value)
                if group == "object_type":
                    quantizer.set_object_type(key, config)
                else:
                    quantizer._apply(_GROUPS[group][0], key, config)
        return quantizer

    def to_dict(self) -> dict[str, object]:
        """Return the settings under the keys of torch.ao's `QConfigMapping.to_dict`, and "first", "last" and
        "small_weights".

        Returns:
            The global config under "", lists of (key, ..., config) under the other keys, and "algorithms" and
            "kv_cache", if set, as in a recipe. Configs are None or dictionaries of `MXQuantizationConfig.to_dict`.

        Raises:
            MXError: with a filter function, which a dictionary cannot store.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer().set_module_name("head", pt2mx.MXQuantizationConfig(weight="mxint8"))
            >>> quantizer.to_dict()["module_name"]
            [('head', {'weight': 'mxint8{32}'})]
        """
        global_config: dict[str, object] | None = None
        plain: dict[str, list[tuple]] = {group: [] for group in _GROUPS if group}
        group_of = {kind: group for group, kinds in _GROUPS.items() for kind in kinds}
        for kind, key, config in self._all("a dictionary"):
            values = None if config is None else config.to_dict()
            if kind == "global":
                global_config = values
            else:
                plain[group_of[kind]].append((*(key if isinstance(key, tuple) else (key,)), values))
        chosen = {} if self.algorithms is None else {recipe.ALGORITHMS: plain_algorithms(self.algorithms)}
        cache = {} if self.kv_cache is None else {recipe.KV_CACHE: str(self.kv_cache)}
        return {"": global_config, **plain, **chosen, **cache}

    def _all(self, form: str) -> list[recipe.Setting]:
        if self._filter is not None:
            raise MXError(f"a filter function cannot be written to {form}: use module names or patterns instead")
        return self._every_setting()

    def _every_setting(self) -> list[recipe.Setting]:
        settings: list[recipe.Setting] = [("global", None, self._global)] if self._global is not None else []
        kinds = self._by_kind()
        return settings + [(kind, key, config) for kind, keys in kinds.items() for key, config in keys.items()]

    def _count(self) -> int:
        """Count the settings except the global one."""
        return sum(map(len, self._by_kind().values()))

    def _apply(self, kind: str, key: recipe.Key, config: Config) -> None:
        """Call the setter of a kind."""
        setter = getattr(self, f"set_{kind}")
        if kind in recipe.COUNTS:
            setter(config, key)
        else:
            setter(*(key if isinstance(key, tuple) else () if key is None else (key,)), config)


def _rows(group: str, entries: object) -> list[tuple[Any, Any]]:
    """Return (key, config) of each entry of a group; a key of several parts is a tuple."""
    length = 4 if group == recipe.ORDER else 2
    if isinstance(entries, list | tuple) and all(isinstance(e, list | tuple) and len(e) == length for e in entries):
        return [(tuple(key) if group == recipe.ORDER else key[0], config) for *key, config in entries]
    raise MXError(f"settings under {group!r} must be a list of ({'key, ' * (length - 1)}config), not {entries!r}")
