"""`MXQuantizer`: settings, and the annotation of a graph with an MX spec for each operand."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.fx import GraphModule, Node

from pt2mx.algorithms.options import Algorithm, chosen_algorithms, plain_algorithms
from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.higher_order_ops import graph_modules, nodes_in_order
from pt2mx.fx.graph.node import args_of, called, make_positional, shape_of
from pt2mx.fx.graph.source_node import propagate_module_stack
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, Quantizer
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.annotate import REASON_KEY, Plan, annotate_operators, plan_choice
from pt2mx.pt2e.quantizer.config import Config, MXQuantizationConfig, checked_config, checked_spec
from pt2mx.pt2e.quantizer.experts import routers
from pt2mx.pt2e.quantizer.operators import (
    CACHE_WRITE,
    argument_of,
    operands_of,
    operator_name,
    quantizable_operators,
    replace_argument,
)
from pt2mx.pt2e.quantizer.settings import (
    MATCHERS,
    Choice,
    Site,
    matching_settings,
    number_calls,
    object_key,
    operator_key,
    sites_of,
    type_key,
)
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from typing_extensions import Self

#: a call of an operator, as an adapter names it; and what the adapter plans for it
CallT = TypeVar("CallT", bound=Hashable)
PlanT = TypeVar("PlanT")

#: the keys of `to_dict`, as in torch.ao's `QConfigMapping`; the others are kinds of settings
_GROUPS = ("", "object_type", "module_name_regex", "module_name", recipe.ORDER, *recipe.COUNTS)
#: kind of setting -> its key in `to_dict`, where they differ
_GROUP_OF = {"global": "", "operator_type": "object_type", "module_type": "object_type"}


class MXQuantizer(Quantizer):
    """Annotates an exported graph with MX specs.

    Each setter takes a config, or None for "leave in high precision", and returns the quantizer. Where several settings
    match an operator, the first of this list wins: filter function, first and last, one call of a module, exact module
    name, module name pattern (in the order in which they were set), module type, small weights, operator, global. Of
    nested modules the innermost wins.

    It works with `pt2mx.prepare_pt2e`, with torchao's own, and inside torchao's `ComposableQuantizer`.

    Example:
        >>> import torch, pt2mx
        >>> fp8 = pt2mx.get_default_mx_quantization_config(weight="mxfp8", activation="mxfp8")
        >>> quantizer = pt2mx.MXQuantizer().set_global(fp8).set_module_name("1", None)
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).eval()
        >>> prepared = pt2mx.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
        >>> [operator.quantized for operator in pt2mx.quantization_report(prepared).operators]
        [True, False]
    """

    def __init__(self) -> None:
        super().__init__()
        self._global: Config = None
        #: setting kind -> key -> config, in the order of a recipe
        self._settings: dict[str, dict[Any, Config]] = {kind: {} for kind in (*recipe.ENDS, *MATCHERS)}
        self._filter: Callable[[Any], bool | str] | None = None
        self._algorithms: tuple[Algorithm, ...] | None = None
        self._kv_cache: MXSpec | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a pickle; up to version 0.2 the settings of the first and last operators were apart from the others."""
        ends = state.get("_ends", {})
        self.__dict__.update({name: value for name, value in state.items() if name != "_ends"})
        self._settings = {**ends, **self._settings}

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
        check_integer("first: count", count, 1)
        return self._set("first", count, config)

    def set_last(self, config: Config, count: int = 1) -> Self:
        """Set the config of the last operators that the other settings quantize.

        Args:
            config, count: as in `set_first`.

        Returns:
            The quantizer.

        Raises:
            MXError: for a count below 1.
        """
        check_integer("last: count", count, 1)
        return self._set("last", count, config)

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
        check_integer(f"{recipe.SMALL_WEIGHTS}: values", values, 1)
        return self._set(recipe.SMALL_WEIGHTS, values, config)

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
        return self._set("module_name", _checked_name("module_name", name), config)

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
        return self._set("module_name_regex", _checked_name("module_name_regex", pattern), config)

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
        name = type_key(module_type) if isinstance(module_type, type) else module_type
        return self._set("module_type", _checked_name("module_type", name), config)

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
        check_integer(f"{recipe.ORDER}: index", index, 0)
        return self._set(recipe.ORDER, (module_name, object_key(object_type)[1], index), config)

    def set_filter_function(self, function: Callable[[Node], bool | str] | None) -> Self:
        """Quantize only the operators for which a function returns True. A filter cannot be stored in a recipe.

        Args:
            function: gets the `torch.fx.Node` of an operator, and returns whether to quantize it, or as a text the
                reason not to, which the report shows; None removes the filter. Where there is no graph of torch, it
                gets the node of the ONNX file, or the module whose weights a checkpoint holds.

        Returns:
            The quantizer.

        Raises:
            MXError: for an object that is not callable.
        """
        if function is not None and not callable(function):
            raise MXError(f"the filter must be a function of a node that returns a bool, not {function!r}")
        self._filter = function
        return self

    @property
    def filter_function(self) -> Callable[[Node], bool | str] | None:
        """Return the function that `set_filter_function` set.

        Example:
            >>> import pt2mx
            >>> pt2mx.MXQuantizer().filter_function is None
            True
        """
        return self._filter

    def set_algorithms(self, algorithms: str | Sequence[Algorithm] | Mapping[str, object] | None) -> Self:
        """Set the algorithms with which `pt2mx.optimize` and `pt2mx quantize` round the weights.

        Args:
            algorithms: a preset ("fast", "imatrix", "balanced", "best"), algorithms of `pt2mx.algorithms`, or a mapping
                from their names to their options. None: `pt2mx.optimize` uses "balanced", `pt2mx quantize` rounds to
                nearest.

        Returns:
            The quantizer.

        Raises:
            MXError: for an unknown preset, algorithm or option.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4").set_algorithms("fast")
            >>> quantizer.algorithms
            (ScaleSearch(by_inputs=False),)
        """
        self._algorithms = None if algorithms is None else chosen_algorithms(algorithms)
        return self

    @property
    def algorithms(self) -> tuple[Algorithm, ...] | None:
        """Return the algorithms that `set_algorithms` or a recipe set, in the order of application; None: not set.

        Returns:
            A tuple of algorithms of `pt2mx.algorithms`, or None.
        """
        return self._algorithms

    def set_kv_cache(self, spec: MXSpec | str | None) -> Self:
        """Set the format of keys and values that a decoder writes to its cache, blocks along the head dimension.

        It applies to writes by `aten.index_copy_`, as of a cache of fixed length, and overrides the settings of the
        modules around them. A language model of `pt2mx.quantize_language_model` stores codes and scales.

        A token must not change the scale of earlier ones. So the scale of a whole tensor, where a format has one, is 1:
        `"nvfp4"` means `fp4_e2m1{16}(e4m3)` here, for values up to 2688 (6 * 448).

        Args:
            spec: None leaves the cache in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for an unknown spec, and for blocks of several rows, which are tokens.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8")
            >>> str(quantizer.kv_cache)
            'mxfp8_e4m3{32}'
            >>> str(quantizer.set_kv_cache("nvfp4").kv_cache)
            'fp4_e2m1{16}(e4m3)'
        """
        checked = checked_spec("kv_cache", spec)
        self._kv_cache = None if checked is None else _of_tokens(checked)
        return self

    @property
    def kv_cache(self) -> MXSpec | None:
        """Return the spec that `set_kv_cache` or a recipe set; None: the cache stays in high precision.

        Returns:
            An `MXSpec`, or None.
        """
        return self._kv_cache

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

        def changed(kind: str, key: recipe.Key, config: Config) -> Config:
            return config if config is None or config.weight is None else replace(config, weight=spec)

        return self.with_configs(changed)

    def with_configs(self, changed: Callable[[str, recipe.Key, Config], Config]) -> Self:
        """Change the configs of the settings.

        Args:
            changed: gets the kind and the key of a setting, as `settings` has them, and its config; returns the new
                config.

        Returns:
            A copy of the quantizer.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4").set_last(None)
            >>> quantizer.with_configs(lambda kind, key, config: None).to_dict()["last"]
            [(1, None)]
        """
        copied = copy.copy(self)
        copied._global = None if self._global is None else changed("global", None, self._global)
        copied._settings = {}
        for kind, configs in self._settings.items():
            copied._settings[kind] = {key: changed(kind, key, config) for key, config in configs.items()}
        return copied

    @property
    def settings(self) -> list[recipe.Setting]:
        """Return the settings that were made, without the algorithms and the cache.

        Returns:
            (kind, key, config) of each, by the kinds of a recipe; the key of the global one is None.

        Example:
            >>> import pt2mx
            >>> [setting[:2] for setting in pt2mx.MXQuantizer.from_recipe("mxfp4").set_last(None).settings]
            [('global', None), ('last', 1)]
        """
        return self._recipe().settings

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
        self._check_no_filter("a recipe")
        return recipe.write(self._recipe(), path)

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
        text = recipe.yaml_of(self._recipe())
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
            if group == "":
                quantizer.set_global(_config(entries))
                continue
            for key, value in _rows(group, entries):
                quantizer._apply(group, key, _config(value))
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
        self._check_no_filter("a dictionary")
        plain: dict[str, Any] = {group: [] for group in _GROUPS}
        plain[""] = None  # the global config, no list
        for kind, key, config in self._recipe().settings:
            values = None if config is None else config.to_dict()
            if kind == "global":
                plain[""] = values
            else:
                keys = key if isinstance(key, tuple) else (key,)
                plain[_GROUP_OF.get(kind, kind)].append((*keys, values))
        if self.algorithms is not None:
            plain[recipe.ALGORITHMS] = plain_algorithms(self.algorithms)
        if self.kv_cache is not None:
            plain[recipe.KV_CACHE] = str(self.kv_cache)
        return plain

    def _set(self, kind: str, key: object, config: Config) -> Self:
        self._settings[kind][key] = checked_config(config)
        return self

    def _apply(self, kind: str, key: recipe.Key, config: Config) -> None:
        """Call the setter of a kind."""
        setter = getattr(self, f"set_{kind}")
        if kind in recipe.COUNTS:
            setter(config, key)
        elif kind == "global":
            setter(config)
        elif kind == recipe.ORDER:
            setter(*cast("tuple", key), config)
        else:
            setter(key, config)

    def _count(self) -> int:
        """Count the settings except the global one."""
        return sum(map(len, self._settings.values()))

    def _recipe(self) -> recipe.Recipe:
        settings: list[recipe.Setting] = []
        if self._global is not None:
            settings.append(("global", None, self._global))
        for kind, configs in self._settings.items():
            settings += [(kind, key, config) for key, config in configs.items()]
        return recipe.Recipe(settings, self.algorithms, self.kv_cache)

    def _check_no_filter(self, form: str) -> None:
        if self._filter is not None:
            raise MXError(f"a filter function cannot be written to {form}: use module names or patterns instead")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of settings that were made, by their keys in a recipe.

        Returns:
            A tuple of names; a filter function, which no recipe stores, is not among them.

        Example:
            >>> import pt2mx
            >>> pt2mx.MXQuantizer.from_recipe("mxfp4").set_last(None).set_kv_cache("mxfp8").kinds
            ('global', 'last', 'kv_cache')
        """
        kinds = [kind for kind, configs in self._settings.items() if configs]
        if self._global is not None:
            kinds.insert(0, "global")
        if self.algorithms:
            kinds.append(recipe.ALGORITHMS)
        if self.kv_cache is not None:
            kinds.append(recipe.KV_CACHE)
        return tuple(kinds)

    def config_of(self, site: Site) -> Choice:
        """Return what the settings say of a call of an operator, apart from the first and last operators.

        Args:
            site: the call.

        Returns:
            The config, or the reason why there is none; and every setting that matches.

        Example:
            >>> import pt2mx
            >>> from pt2mx.pt2e.quantizer.settings import Site
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4").set_module_name("head", None)
            >>> quantizer.config_of(Site("aten.linear", ("", "head"))).reason
            "excluded by module_name 'head'"
        """
        if self._kv_cache is not None and site.operator == CACHE_WRITE:
            return Choice(MXQuantizationConfig(activation=self._kv_cache), matching=((recipe.KV_CACHE, None),))
        matching = tuple(matching_settings(self._settings, site))
        accepted = True if self._filter is None else self._filter(site.call)
        if not accepted or isinstance(accepted, str):
            return Choice(None, accepted or "excluded by the filter function", matching)
        is_general = all(kind == recipe.SMALL_WEIGHTS for kind, _ in matching)
        if matching:
            kind, key = matching[0]
            return Choice(self._settings[kind][key], f"excluded by {kind} {key!r}", matching, is_general)
        return Choice(self._global, "no setting matches it", is_general=self._global is not None)

    def plan(
        self,
        sites: Mapping[CallT, Site],
        ordered: Iterable[CallT],
        planned: Callable[[CallT, Choice], PlanT],
    ) -> dict[CallT, PlanT]:
        """Plan every call of a model. A warning names settings that match nothing, or says that there are none.

        Args:
            sites: call -> its site.
            ordered: the calls in the order of execution, by which first and last ones are counted. A call may occur
                several times, and others are ignored.
            planned: makes a plan of a call and of what the settings say of it. A plan is true if it quantizes anything.

        Returns:
            call -> its plan.
        """
        choices = {call: self.config_of(site) for call, site in sites.items()}
        plans = {call: planned(call, choice) for call, choice in choices.items()}
        # a cache is no layer: its format is set for the whole model
        layers = [call for call in ordered if plans.get(call) and sites[call].operator != CACHE_WRITE]
        ends = self._at_the_ends(layers)
        for call, choice in ends.items():
            plans[call] = planned(call, choice)
        matched = {setting for choice in (*choices.values(), *ends.values()) for setting in choice.matching}
        self._warn_unmatched(sites.values(), matched)
        return plans

    def _at_the_ends(self, layers: Sequence[CallT]) -> dict[CallT, Choice]:
        """Return what `set_first` and `set_last` say of quantized calls, given in the order of execution."""
        ends: dict[CallT, Choice] = {}
        for kind, ordered in (("first", layers), ("last", layers[::-1])):
            distinct = list(dict.fromkeys(ordered))
            for count, config in sorted(self._settings[kind].items()):
                for call in distinct[:count]:
                    ends.setdefault(call, Choice(config, f"excluded by {kind} {count}", ((kind, count),)))
        return ends

    def _warn_unmatched(self, sites: Iterable[Site], matched: set[tuple[str, Any]]) -> None:
        if self._global is None and self._kv_cache is None and not self._count():
            warnings.warn(
                "the quantizer has no setting, so that it quantizes nothing: call set_global("
                "get_default_mx_quantization_config()), another setter, or MXQuantizer.from_recipe(name)",
                stacklevel=4,
            )
        if self._kv_cache is not None and (recipe.KV_CACHE, None) not in matched:
            warnings.warn("kv_cache is set, but the model writes to no cache by aten.index_copy_", stacklevel=4)
        names: set[str] = set()
        types: set[str] = set()
        for site in sites:
            names.update(name for name in site.path if name)
            types.update(kind.rpartition(".")[2] for kind in site.module_types)
        known = {"module_name": names, "module_name_regex": names, "module_type": types}
        for kind, configs in self._settings.items():
            for key in configs:
                if (kind, key) not in matched:
                    near = nearest(key, sorted(known[kind])).split(" allowed:")[0] if kind in known else ""
                    hint = f"; {near}" if near.startswith("did") else ""
                    warnings.warn(f"the setting {kind} {key!r} matches no operator of the model{hint}", stacklevel=4)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Give each quantized operand its own edge, by an `alias` in front of its consumer where it has none.

        torchao keys annotations by (producer, consumer) and reads positional arguments only, so that `x @ x` would get
        one spec. It observes a tensor where it is produced, and would miss later writes (`x[:, 0] = 5`).

        Args:
            model: the exported graph, which is changed.

        Returns:
            The same graph module.
        """
        for graph in graph_modules(model):
            self._give_edges(graph)
        return model

    def _give_edges(self, model: GraphModule) -> None:
        written, changed = written_nodes(model.graph), False
        for node in self._candidates(model):
            make_positional(node)
            inputs = _arguments(node)
            for operand in operands_of(node):
                argument = argument_of(node, operand)
                if argument is not None and (inputs.count(argument) > 1 or argument in written):
                    with model.graph.inserting_before(node):
                        alias = model.graph.call_function(torch.ops.aten.alias.default, (argument,))
                    alias.meta.update({k: v for k, v in argument.meta.items() if k != Q_ANNOTATION_KEY})
                    replace_argument(node, operand, alias)
                    changed = True
        if changed:
            model.recompile()

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every quantizable operator that a setting selects, also in subgraphs.

        Annotations of another quantizer are kept. A warning names settings that match nothing, or says that there are
        none.

        Args:
            model: the exported graph, whose nodes' meta is changed.

        Returns:
            The same graph module.

        Raises:
            MXError: for an operator that computes in float64.
        """
        propagate_module_stack(model)
        graphs = graph_modules(model)
        constants: set[Node] = set().union(*[constant_nodes(graph.graph) for graph in graphs])
        ordered = nodes_in_order(model)
        calls = number_calls(ordered) if self._settings[recipe.ORDER] else {}
        candidates: list[Node] = []
        for node in (node for graph in graphs for node in self._candidates(graph)):
            if Q_ANNOTATION_KEY in node.meta:
                node.meta[REASON_KEY] = "annotated by another quantizer"
            else:
                candidates.append(node)
        sites = sites_of(candidates, constants, calls)
        chosen_by = routers(model)
        plans = self.plan(sites, ordered, lambda node, choice: plan_choice(node, choice, constants, chosen_by))
        annotate_operators(plans.values())
        _warn_unknown_operands(plans.values())
        return model

    def validate(self, model: GraphModule) -> None:
        """Do nothing: `annotate` makes valid annotations only."""

    def _candidates(self, model: GraphModule) -> list[Node]:
        requested = set(self._settings["operator_type"]) | ({CACHE_WRITE} if self._kv_cache else set())
        nodes = quantizable_operators(model.graph, requested)
        if CACHE_WRITE not in requested:
            return nodes
        return [node for node in nodes if operator_name(called(node)) != CACHE_WRITE or _writes_cache(node)]


def _warn_unknown_operands(plans: Iterable[Plan]) -> None:
    known: dict[MXQuantizationConfig, set[str]] = {}
    for plan in plans:
        if plan.config is not None and plan.config.operands:
            known.setdefault(plan.config, set()).update(operand.name for operand in operands_of(plan.node))
    for config, names in known.items():
        for name, _ in config.operands:
            if name not in names:
                warnings.warn(
                    f"none of the operators whose config names the operand {name!r} has one; they have "
                    + ", ".join(sorted(names)),
                    stacklevel=3,
                )


def _writes_cache(node: Node) -> bool:
    """Return True for a write to a cache of (B, heads, S, width), at positions along S."""
    return operator_name(called(node)) == CACHE_WRITE and args_of(node)[1] == 2 and len(shape_of(node) or ()) == 4


def _arguments(node: Node) -> list[Node]:
    """Return the nodes that a call reads, with repetitions."""
    inputs: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), inputs.append)
    return inputs


def _checked_name(kind: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise MXError(f"{kind} must be a string that is not empty, not {name!r}")
    return name


def _config(value: object) -> Config:
    return MXQuantizationConfig.from_dict(value) if isinstance(value, Mapping) else checked_config(value)


def _rows(group: str, entries: object) -> list[tuple[Any, Any]]:
    """Return (key, config) of each entry of a group; a key of several parts is a tuple."""
    length = 4 if group == recipe.ORDER else 2
    if isinstance(entries, list | tuple) and all(isinstance(e, list | tuple) and len(e) == length for e in entries):
        return [(tuple(key) if group == recipe.ORDER else key[0], config) for *key, config in entries]
    raise MXError(f"settings under {group!r} must be a list of ({'key, ' * (length - 1)}config), not {entries!r}")


def _of_tokens(spec: MXSpec) -> MXSpec:
    """Return the format of tensors to which tokens are added, in which blocks run along the last dimension."""
    if spec.block_rows > 1:
        raise MXError(f"kv_cache: {spec} has blocks of {spec.block_rows} rows, which are tokens: choose one row")
    return spec.without_tensor_scale().replace(axis=-1)
