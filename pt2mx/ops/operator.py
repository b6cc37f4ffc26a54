"""The declaration of an operator `torch.ops.pt2mx.*`: one frozen dataclass of its arguments.

The fields are the operator's signature, and their annotations say the rest: `@operator` makes the dataclass and the
schema from them, and registers the methods.

| method | |
|---|---|
| `check` | an error for arguments that do not fit each other; else what the kernel needs of them |
| `define` | the result where no kernel of `pt2mx.kernels.select` supports the call; by default `decompose` |
| `kernel` | the result, on every device; by default that of a kernel, or else of `define` |
| `fake`, or `result_shape` and `result_dtype` | an empty tensor like the result |
| `backward`, `saved`, `remember` | the gradients by field, and what they read |
| `decompose` | the result by aten operators, for programs that run without pt2mx |

A format is one field, a spec, and several arguments of the schema: files and compilers read plain values. Only the
annotation `Format` of the field knows which; `from_args` joins them, and `args` takes the spec apart.

The class is also the operator's entry in the contract (`pt2mx.ops.contract`), and the view of a node that calls it
(`pt2mx.fx.graph.node`): `T` is a tensor in a kernel and a node in a graph.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from typing_extensions import Self, dataclass_transform

from pt2mx.errors import MXError
from pt2mx.kernels.cpu.repeated import run_again
from pt2mx.kernels.select import run_kernel
from pt2mx.spec import MXSpec

T = TypeVar("T", bound=Any)
_Class = TypeVar("_Class", bound="type[Operator]")
_Operator = TypeVar("_Operator", bound="Operator")

COMPLIANT = (torch.Tag.pt2_compliant_tag,)
#: kernels take any strides: without the second tag Inductor copies an input for each of the calls that share it
ANY_STRIDES = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

#: annotation of a field -> type in a schema
_TYPES = {T: "Tensor", str: "str", int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}
#: the scales of blocks where the argument is None
_SCALE_DEFAULTS = {"scale_format": "e8m0", "block_rows": 1}
#: the arguments of a spec that is None
_NO_FORMAT = {"element": None, "block_size": 32, "scale_mode": "floor", "rounding": "even"}
#: dispatch key of autocast -> type of device
_AUTOCAST = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastXPU": "xpu"}


class As(NamedTuple):
    """Part of a field's annotation: its name in the schema, where that is another, and a type of its own."""

    name: str = ""
    type: str = ""


class Format(NamedTuple):
    """Part of the annotation of a field that holds a spec: the arguments that the spec is in the schema.

    Args:
        here: field of `MXSpec` -> the annotation of its argument, at the place of the field.
        behind: field of the operator -> the same, of the arguments behind that field. Those that may be None are None
            by default.
        of: the tensor that has the format, for errors, where an operator has several formats.

    Fields of the spec that are no argument have their defaults in a call that was joined.
    """

    here: Mapping[str, Any]
    behind: Mapping[str, Mapping[str, Any]] = {}
    of: str = ""


class Argument(NamedTuple):
    """An argument of the schema.

    Args:
        field: the field that holds it.
        part: the field of the spec, where `field` holds one; else "".
        name: in the schema.
        type: in the schema.
        meaning: in the contract.
        is_optional: True if its default is None, the only one: files would leave out an argument with another.
    """

    field: str
    part: str
    name: str
    type: str
    meaning: str
    is_optional: bool

    @property
    def declaration(self) -> str:
        """The argument in the schema."""
        return f"{self.type} {self.name}" + ("=None" if self.is_optional else "")


class Autocast(NamedTuple):
    """The casts that `torch.autocast` makes for a matmul: tensors to its dtype, as of `torch.nn.functional.linear`.

    Args:
        fields: which are cast. A dtype that was asked for becomes None, and the result has that of autocast.
        computes_in: the one dtype that the operator takes; its result is cast to that of autocast.
    """

    fields: tuple[str, ...]
    computes_in: torch.dtype | None = None


class Operator(Generic[T]):
    """The arguments of a call, in the order of the schema; a subclass names one operator and all of its arguments."""

    __slots__ = ()
    #: the operator that was registered
    overload: ClassVar[OpOverload]
    name: ClassVar[str]
    #: rises with every change of the schema or of the numbers
    version: ClassVar[int]
    #: name of each result ("" of a single one) -> its meaning
    results: ClassVar[Mapping[str, str]]
    words: ClassVar[Mapping[str, str]]
    arguments: ClassVar[tuple[Argument, ...]]
    #: how many arguments a graph writes out at least: for good, trailing ones of scales that are None mean E8M0
    written: ClassVar[int]
    _order: ClassVar[_Order]
    _saved: ClassVar[tuple[str, ...]]

    @classmethod
    def summary(cls) -> str:
        """Return what the operator does, in one line."""
        text = " ".join((cls.__doc__ or "").partition("Example:")[0].split())
        return text.format(**cls.words) if cls.words else text

    @classmethod
    def example(cls) -> str:
        """Return calls of the operator with their results."""
        return textwrap.dedent((cls.__doc__ or "").partition("Example:\n")[2])

    @classmethod
    def from_args(cls, *args: Any) -> Self:
        """Return the call with these arguments, in the order of the schema; trailing ones that are None may lack."""
        return cls(*cls._order.joined(args))

    @property
    def args(self) -> tuple[Any, ...]:
        """All arguments, in the order of the schema."""
        return self._order.split(self)

    def call(self) -> Any:
        """Return what the operator gives for these arguments, by torch's dispatcher."""
        return self.overload(*self.args)

    @classmethod
    def function(cls, of_call: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return a function of the operator's arguments: `of_call` of the call that they make."""
        joined = cls._order.joined
        return lambda *args: of_call(cls(*joined(args)))

    @classmethod
    def run(cls, *args: Any) -> Any:
        """Return the result for these arguments: as an earlier call found it that this one repeats, or else by
        `kernel`."""
        result = run_again(cls.name, args)
        return cls.from_args(*args).kernel() if result is NotImplemented else result

    def replace(self, **fields: Any) -> Self:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[type-var]  # every subclass is a dataclass

    def as_call_of(self, operator: type[_Operator], **fields: Any) -> _Operator:
        """Return a call of another operator, with the fields that both have by name, and other values of `fields`."""
        names = {field.name for field in dataclasses.fields(operator)}  # type: ignore[arg-type]
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name in names}  # type: ignore[attr-defined]
        return operator(**{**own, **fields})

    def check(self) -> Any:
        """Return the spec and, where it is an argument, the dtype of the result, for `kernel`. Raise MXError for
        arguments that the operator does not take."""

    def kernel(self) -> Any:
        """Return the result, by the kernel for the device or else by the definition."""
        checked = self.check()
        if checked is None:
            return run_kernel(self)
        return run_kernel(self, *checked) if isinstance(checked, tuple) else run_kernel(self, checked)

    def define(self, *checked: Any) -> Any:
        """Return the result without a kernel for the device. `checked`: what `check` returned."""
        return self.decompose()  # type: ignore[attr-defined]  # every operator that defines nothing else has one

    @property
    def result_shape(self) -> Sequence[int]:
        """The shape of the result; by default the shape of the first argument."""
        return self.args[0].shape

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the result: `target_dtype`, or else the dtype of the first argument."""
        return getattr(self, "target_dtype", None) or self.args[0].dtype

    def fake(self) -> Any:
        """Return an empty tensor like the result, contiguous."""
        self.check()
        return self.args[0].new_empty(self.result_shape, dtype=self.result_dtype)

    def saved(self) -> tuple[str, ...]:
        """Return the fields of the tensors that `backward` reads."""
        return self._saved

    def remember(self, ctx: Any, outputs: Any) -> None:
        """Keep what else `backward` reads; `ctx.shape` and `ctx.dtype` are those of the first argument."""


@dataclass_transform(frozen_default=True)
def operator(
    name: str,
    version: int,
    results: str | Mapping[str, str],
    tags: Sequence[torch.Tag] = ANY_STRIDES,
    autocast: Autocast | None = None,
    saved: tuple[str, ...] = (),
    key: str = "CompositeExplicitAutograd",
    differentiable_once: bool = False,
    words: Mapping[str, str] | None = None,
) -> Callable[[_Class], _Class]:
    """Make a class a frozen dataclass, and register the operator that it declares.

    Args:
        name: of the operator.
        version: of its contract.
        results: the meaning of the result, or of each by its name in the schema.
        tags: of torch.
        autocast: how `torch.autocast` casts the arguments; None for not at all.
        saved: the fields of the tensors that `backward` reads.
        key: the dispatch key of `kernel`.
        differentiable_once: a second derivative is an error.
        words: values of the names in braces in the docstring of the class.
    """

    def register(declared: Any) -> Any:
        cls: Any = dataclasses.dataclass(frozen=True, slots=True)(declared)
        cls.name, cls.version, cls.words, cls._saved = name, version, words or {}, saved
        cls.results = {"": results} if isinstance(results, str) else results
        hints = get_type_hints(cls, include_extras=True)
        formats = {name: hint.__metadata__[0] for name, hint in hints.items() if _is_format(hint)}
        cls.arguments = _arguments(cls, hints, formats)
        of_scales = (i for i, argument in enumerate(cls.arguments) if argument.part and argument.is_optional)
        cls.written = next(of_scales, len(cls.arguments))
        cls._order = _Order([field.name for field in dataclasses.fields(cls)], cls.arguments, formats)
        returned = ", ".join(f"Tensor {result}".rstrip() for result in cls.results)
        returned = returned if "" in cls.results else f"({returned})"
        schema = f"({', '.join(argument.declaration for argument in cls.arguments)}) -> {returned}"
        torch.library.define(f"pt2mx::{name}", schema, tags=tuple(tags))
        cls.overload = getattr(torch.ops.pt2mx, name).default
        torch.library.impl(f"pt2mx::{name}", key, cls.run)
        if key != "CompositeImplicitAutograd":
            torch.library.register_fake(f"pt2mx::{name}", cls.function(cls.fake))
        if hasattr(cls, "backward"):
            _register_gradient(cls, differentiable_once)
        if autocast:
            for autocast_key, device in _AUTOCAST.items():
                torch.library.impl(f"pt2mx::{name}", autocast_key, _casting(cls, autocast, autocast_key, device))
        return cls

    return register


def _arguments(cls: Any, hints: Mapping[str, Any], formats: Mapping[str, Format]) -> tuple[Argument, ...]:
    """Return the arguments of the schema that the fields of a class declare."""
    arguments: list[Argument] = []
    for field in dataclasses.fields(cls):
        if field.name in formats:
            for part, annotation in formats[field.name].here.items():
                arguments.append(_argument(field.name, part, annotation, False))
        else:
            if field.default not in (dataclasses.MISSING, None):
                raise TypeError(f"{field.name}={field.default!r}: the only default of an argument is None")
            arguments.append(_argument(field.name, "", hints[field.name], field.default is None))
        for name, format in formats.items():
            for part, annotation in format.behind.get(field.name, {}).items():
                arguments.append(_argument(name, part, annotation, _is_optional(annotation)))
    return tuple(arguments)


def _is_format(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and isinstance(annotation.__metadata__[0], Format)


def _is_optional(annotation: Any) -> bool:
    return type(None) in get_args(get_args(annotation)[0])


def _argument(field: str, part: str, annotation: Any, is_optional: bool) -> Argument:
    metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    meaning = [entry for entry in metadata if isinstance(entry, str)][-1]
    names = next((entry for entry in metadata if isinstance(entry, As)), As())
    hint = get_args(annotation)[0] if metadata else annotation
    options = [option for option in get_args(hint) if option is not type(None)]
    type_name = names.type or (f"{_TYPES[options[0]]}?" if options else _TYPES[hint])
    return Argument(field, part, names.name or part or field, type_name, meaning, is_optional)


class _Parts:
    """The arguments of a schema that one spec is."""

    def __init__(self, name: str, of: str, arguments: Sequence[Argument]) -> None:
        self.name, self._of = name, of
        self.arguments = [argument for argument in arguments if argument.field == name]
        self.values_in = _items([arguments.index(argument) for argument in self.arguments])
        #: validating a spec takes longer than a kernel of a small tensor
        self.join, self.cached_split = functools.lru_cache(4096)(self._join), functools.lru_cache(4096)(self.split)
        parts = {argument.part for argument in self.arguments}
        self._takes_formats = "scale_format" in parts
        self._takes_rows = "block_rows" in parts or "block_size" not in parts

    def _join(self, *values: Any) -> MXSpec | None:
        """Return the spec of some arguments; None without an element."""
        named = zip(self.arguments, values, strict=True)
        fields = {argument.part: value for argument, value in named if value is not None}
        try:
            return MXSpec(**fields) if "element" in fields else None
        except MXError as error:
            raise MXError(f"{self._of}: {error}" if self._of else str(error)) from None

    def split(self, spec: MXSpec | None) -> tuple[Any, ...]:
        """Return the arguments that a spec is. Raise MXError for scales that they cannot name."""
        if spec is None:
            return tuple([_NO_FORMAT[argument.part] for argument in self.arguments])
        if not isinstance(spec, MXSpec):
            raise MXError(f"{spec!r} is no MXSpec: give pt2mx.parse(...) of it")
        spec.check_operators()
        if not self._takes_formats or (spec.block_rows > 1 and not self._takes_rows):
            spec.check_plain_scale()
        return tuple([_value(spec, argument) for argument in self.arguments])


def _value(spec: MXSpec, argument: Argument) -> Any:
    value = getattr(spec, argument.part)
    if argument.part in ("element", "scale_format"):
        value = value.name
    return None if argument.is_optional and value == _SCALE_DEFAULTS[argument.part] else value


class _Order:
    """Between the fields of a class, in their order, and the arguments of its schema, in theirs."""

    def __init__(self, fields: list[str], arguments: Sequence[Argument], formats: Mapping[str, Format]) -> None:
        self._fields, self._count = fields, len(arguments)
        self._fields_of = attrgetter(*fields) if len(fields) > 1 else lambda call: (getattr(call, fields[0]),)
        self._formats = [_Parts(name, format.of, arguments) for name, format in formats.items()]
        # the specs stand behind the arguments
        plain = {argument.field: i for i, argument in enumerate(arguments) if not argument.part}
        specs = {parts.name: len(arguments) + i for i, parts in enumerate(self._formats)}
        self._to_fields = _items([{**plain, **specs}[field] for field in fields])
        # the arguments of the specs stand behind the fields
        sources = [*fields, *(argument for parts in self._formats for argument in parts.arguments)]
        self._sources = [sources.index(argument if argument.part else argument.field) for argument in arguments]
        self._to_schema = _items(self._sources)

    def joined(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the fields that some arguments are."""
        args += (None,) * (self._count - len(args))
        specs = [parts.join(*parts.values_in(args)) for parts in self._formats]
        return self._to_fields((*args, *specs))

    def split(self, call: Operator) -> tuple[Any, ...]:
        """Return the arguments that the fields of a call are."""
        if torch.compiler.is_compiling():
            return self._split_traced(call)
        values = self._fields_of(call)
        for parts in self._formats:
            values += parts.cached_split(getattr(call, parts.name))
        return self._to_schema(values)

    def _split_traced(self, call: Operator) -> tuple[Any, ...]:
        """Do the same in Python alone: torch.compile traces neither caches nor `attrgetter`."""
        values = [getattr(call, field) for field in self._fields]
        for parts in self._formats:
            values += parts.split(getattr(call, parts.name))
        return tuple([values[i] for i in self._sources])


def _items(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return what reads some items of a tuple, in one call of C."""
    return itemgetter(*indices) if len(indices) > 1 else lambda values: (values[indices[0]],)


def _register_gradient(cls: Any, differentiable_once: bool) -> None:
    """Register the `backward` of an operator's class; a second derivative is an error if `differentiable_once`."""
    backward = once_differentiable(_backward(cls)) if differentiable_once else _backward(cls)
    torch.library.register_autograd(f"pt2mx::{cls.name}", backward, setup_context=_setup_context(cls), lib=_LIBRARY)


class _WithoutTangents(torch.library.Library):
    """Registers autograd kernels that refuse inputs with a tangent: torch would drop the tangent silently. A call
    without a gradient that repeats an earlier one skips torch's way to the kernel, which takes as long."""

    def impl(self, op_name: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Register a kernel of an operator."""

        def kernel(keyset: Any, *inputs: Any, **named: Any) -> Any:
            if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
                raise MXError(
                    f"{op_name} has no derivative in forward mode: call backward(), or for fake quantization "
                    "pt2mx.fake_quantize_mx"
                )
            if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
                result = run_again(op_name, inputs)
                if result is not NotImplemented:
                    return result
            return fn(keyset, *inputs, **named)

        super().impl(op_name, kernel, *args, **options)


def _has_tangent(argument: object) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None


_LIBRARY = _WithoutTangents("pt2mx", "FRAGMENT")


def _setup_context(cls: Any) -> Callable[..., None]:
    """Return what keeps the arguments for `backward`: only those tensors that it reads."""
    tensors = dict.fromkeys(a.field for a in cls.arguments if a.type.startswith("Tensor"))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call = cls.from_args(*inputs)
        ctx.shape, ctx.dtype, ctx.saved = inputs[0].shape, inputs[0].dtype, call.saved()
        ctx.save_for_backward(*(getattr(call, name) for name in ctx.saved))
        ctx.call = call.replace(**tensors)
        call.remember(ctx, output)

    return setup_context


def _backward(cls: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call.replace(**dict(zip(ctx.saved, ctx.saved_tensors, strict=True)))
        ctx.needs = {a.field for a, needed in zip(cls.arguments, ctx.needs_input_grad, strict=False) if needed}
        gradients = call.backward(ctx, *grads)
        return tuple(gradients.get(argument.field) for argument in cls.arguments)

    return backward


def gradients_by_recomputing(
    call: Any, names: Sequence[str], function: Callable[[Any], Sequence[Tensor]], grads: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """Return the gradients of some fields of a call through `function(call)`, which is computed again."""
    with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):  # the operands were cast already
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
        results = function(call.replace(**leaves))
    pairs = [(y, grad.to(y.dtype)) for y, grad in zip(results, grads, strict=True) if y.requires_grad]
    outputs, of_outputs = zip(*pairs, strict=True)
    return dict(zip(names, torch.autograd.grad(outputs, list(leaves.values()), of_outputs), strict=True))


def _casting(cls: type[Operator], autocast: Autocast, key: str, device: str) -> Callable[..., Any]:
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    cast = [argument.field in autocast.fields for argument in cls.arguments]

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        to = autocast.computes_in or dtype
        with torch._C._ExcludeDispatchKeyGuard(without):
            result = cls.overload(*(_cast(a, to) if is_cast else a for a, is_cast in zip(args, cast, strict=False)))
            return result.to(dtype) if autocast.computes_in else result

    return kernel


def _cast(argument: object, dtype: torch.dtype) -> object:
    """Cast a floating tensor; float64 stays, as autocast has it. A dtype that was asked for is left to it too."""
    if isinstance(argument, torch.dtype):
        return None
    if isinstance(argument, Tensor) and argument.is_floating_point() and argument.dtype != torch.float64:
        return argument.to(dtype)
    return argument
