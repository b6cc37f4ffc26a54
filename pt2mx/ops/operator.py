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

The class is also the operator's entry in the contract (`pt2mx.ops.contract`), and the view of a node that calls it
(`pt2mx.fx.graph.node`): `T` is a tensor in a kernel and a node in a graph.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload
from typing_extensions import Self, dataclass_transform

from pt2mx.kernels.select import run_kernel
from pt2mx.ops.gradients import register_gradient

T = TypeVar("T", bound=Any)
_Class = TypeVar("_Class", bound="type[Operator]")

COMPLIANT = (torch.Tag.pt2_compliant_tag,)
#: kernels take any strides: without the second tag Inductor copies an input for each of the calls that share it
ANY_STRIDES = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

#: annotation of a field -> type in a schema
_TYPES = {T: "Tensor", str: "str", int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}
#: dispatch key of autocast -> type of device
_AUTOCAST = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastXPU": "xpu"}


class As(NamedTuple):
    """Part of a field's annotation: its name in the schema, where that is another, and a type of its own."""

    name: str = ""
    type: str = ""


class Argument(NamedTuple):
    """An argument as its field declares it: field, name and type in the schema, and the meaning in the contract."""

    field: dataclasses.Field[Any]
    name: str
    type: str
    meaning: str

    @property
    def declaration(self) -> str:
        """The argument in the schema. A default other than None is an error: files would leave such an argument out."""
        if self.field.default not in (dataclasses.MISSING, None):
            raise TypeError(f"{self.name}={self.field.default!r}: the only default of an argument is None")
        return f"{self.type} {self.name}" + ("=None" if self.field.default is None else "")


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
    _getter: ClassVar[Callable[[Any], tuple[Any, ...]]]
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

    @property
    def args(self) -> tuple[Any, ...]:
        """All arguments, in the order of the schema."""
        return type(self)._getter(self)

    @classmethod
    def function(cls, of_call: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return a function of the operator's arguments: `of_call` of the call that they make."""
        return lambda *args: of_call(cls(*args))

    def replace(self, **fields: Any) -> Self:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[type-var]  # every subclass is a dataclass

    @property
    def has_plain_scale(self) -> bool:
        """True for E8M0 scales of one row, the only ones of an operator without a scale format."""
        return True

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


class TrailingArguments(Operator[T]):
    """Arguments that several operators take after their own; None by default. A subclass declares them."""

    __slots__ = ()


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
        _append_trailing_fields(declared)
        cls: Any = dataclasses.dataclass(frozen=True, slots=True)(declared)
        hints = get_type_hints(cls, include_extras=True)
        cls.name, cls.version, cls.words, cls._saved = name, version, words or {}, saved
        cls.results = {"": results} if isinstance(results, str) else results
        cls.arguments = tuple(_argument(field, hints[field.name]) for field in dataclasses.fields(cls))
        cls._getter = _getter([argument.field.name for argument in cls.arguments])
        returned = ", ".join(f"Tensor {result}".rstrip() for result in cls.results)
        returned = returned if "" in cls.results else f"({returned})"
        schema = f"({', '.join(argument.declaration for argument in cls.arguments)}) -> {returned}"
        torch.library.define(f"pt2mx::{name}", schema, tags=tuple(tags))
        cls.overload = getattr(torch.ops.pt2mx, name).default
        torch.library.impl(f"pt2mx::{name}", key, cls.function(cls.kernel))
        if key != "CompositeImplicitAutograd":
            torch.library.register_fake(f"pt2mx::{name}", cls.function(cls.fake))
        if hasattr(cls, "backward"):
            register_gradient(cls, differentiable_once)
        if autocast:
            for autocast_key, device in _AUTOCAST.items():
                torch.library.impl(f"pt2mx::{name}", autocast_key, _casting(cls, autocast, autocast_key, device))
        return cls

    return register


def _append_trailing_fields(declared: type[Operator]) -> None:
    """Give a class the fields of its base `TrailingArguments`, after its own; their default is None."""
    for base in declared.__mro__[1:]:
        if TrailingArguments in base.__bases__:
            for name, annotation in get_type_hints(base, include_extras=True).items():
                if name in base.__annotations__:
                    declared.__annotations__[name] = annotation
                    setattr(declared, name, None)


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the fields of a call, in one call of C."""
    return attrgetter(*names) if len(names) > 1 else lambda call: (getattr(call, names[0]),)


def _argument(field: dataclasses.Field[Any], annotation: Any) -> Argument:
    metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    meaning = [entry for entry in metadata if isinstance(entry, str)][-1]
    names = next((entry for entry in metadata if isinstance(entry, As)), As())
    hint = get_args(annotation)[0] if metadata else annotation
    options = [option for option in get_args(hint) if option is not type(None)]
    type_name = names.type or (f"{_TYPES[options[0]]}?" if options else _TYPES[hint])
    return Argument(field, names.name or field.name, type_name, meaning)


def _casting(cls: type[Operator], autocast: Autocast, key: str, device: str) -> Callable[..., Any]:
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    cast = [argument.field.name in autocast.fields for argument in cls.arguments]

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
