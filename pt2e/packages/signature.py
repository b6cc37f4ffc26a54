"""The signature of a model, with which arguments are compared: the tree, dtypes and shapes of its inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.pt2e.packages.conditions import by_name, guards, parameters, relations
from pt2mx.pt2e.packages.extents import Range, input_nodes, ranges
from pt2mx.pt2e.packages.nesting import leaves_by_name
from pt2mx.pt2e.packages.shared_memory import check_shared_memory


@dataclass(frozen=True)
class Signature:
    """An example of a call, and what is known of each leaf of its arguments.

    Args:
        args: positional arguments of the example: trees of tensors on the CPU, and of constants.
        kwargs: its keyword arguments.
        names: a name of each leaf.
        ranges: for each leaf that is a tensor the ranges of its dimensions; for a number that a call may change its own
            range, as a list of one; None for a constant.
        parameters: the names of the positional arguments.
        guards: further conditions, in the form of `pt2mx.pt2e.packages.conditions`.
        written: the names of the leaves that a call writes to.
        numbers: the indices of those leaves of the outputs that are numbers.
    """

    args: tuple
    kwargs: dict
    names: list[str]
    ranges: list[list[Range] | None]
    parameters: list[str]
    guards: list[str]
    written: list[str]
    numbers: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, program: ExportedProgram, module: GraphModule, least: Mapping | None = None, conditions: Iterable[str] = ()
    ) -> Signature:
        """Return the signature of a program.

        Args:
            program: with example inputs.
            module: what was exported to it.
            least: lower bounds of symbols, as `ranges` takes them.
            conditions: further ones.
        """
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), program.example_inputs)
        nodes, written = input_nodes(program), written_nodes(program.graph)
        return cls(
            args,
            kwargs,
            names=[node.name for node in nodes],
            ranges=ranges(program, least),
            parameters=parameters(module, len(args)),
            guards=[*relations(program), *guards(program), *conditions],
            written=[node.name for node in nodes if node in written],
            numbers=_numbers(program),
        )

    @cached_property
    def inputs(self) -> list[tuple[str, object, list[Range] | None]]:
        """The (name, example, ranges) of each leaf."""
        return list(zip(self.names, self._flat[0], self.ranges, strict=True))

    @cached_property
    def trees(self) -> dict[str, object]:
        """The arguments by their names, each with the names of its leaves in their places."""
        args, kwargs = self.unflatten(self.names)
        return {**dict(zip(self.parameters, args, strict=True)), **kwargs}

    def unflatten(self, leaves: Sequence[object]) -> tuple[tuple, dict]:
        """Return the arguments, positional and keyword, with these leaves."""
        return pytree.tree_unflatten(leaves, self._flat[1])

    def checked(self, args: tuple, kwargs: dict, device: torch.device | None = None) -> tuple[tuple, dict]:
        """Return the arguments as compiled code reads them: tensors have the strides of the example's, by a copy if
        need be.

        Args:
            args: positional arguments of a call.
            kwargs: its keyword arguments.
            device: the device on which tensors must be; by default any.

        Raises:
            MXError: for arguments that the model does not take (their number, names, nesting, dtypes, shapes, device,
                or a constant that is not the example's), and for one that is written to and shares memory with another.
        """
        by_parameter = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(self.trees) or by_parameter.keys() != self.trees.keys():
            raise MXError(f"call it with {self._expected}: given are {_described(args, kwargs)}")
        named: dict[str, object] = {}
        for parameter, tree in self.trees.items():
            named.update(leaves_by_name(by_parameter[parameter], tree, f"the argument {parameter!r}"))
        leaves = [named[name] for name in self.names]
        for given, (name, example, extents) in zip(leaves, self.inputs, strict=True):
            check_leaf(name, given, example, extents, device)
        if self.written:
            check_shared_memory(named, self.written)
        arranged = [self._arranged(*leaf) for leaf in zip(self.names, leaves, self._orders, strict=True)]
        args, kwargs = self.unflatten(arranged)
        if self._conditions:
            self._check_conditions(by_name(arranged, self.parameters, args, kwargs))
        return args, kwargs

    def returned(self, outputs: object) -> object:
        """Return the outputs of compiled code, which makes tensors of numbers, as the model returns them."""
        if not self.numbers:
            return outputs
        leaves, tree = pytree.tree_flatten(outputs)
        return pytree.tree_unflatten([x.item() if i in self.numbers else x for i, x in enumerate(leaves)], tree)

    def _check_conditions(self, arguments: dict[str, object]) -> None:
        for condition, holds in self._conditions:
            try:
                met = holds(arguments)
            except ZeroDivisionError:
                met = False
            if not met:
                raise MXError(f"the shapes of the inputs must meet the condition {self._readable(condition)}")

    def _arranged(self, name: str, given: object, order: list[int] | None) -> object:
        """Return the tensor with its dimensions in this order in memory, without gaps: itself if it lies so. Another
        leaf has no order."""
        if order is None or not isinstance(given, Tensor):
            return given
        sorted_dims = given.permute(order)
        if sorted_dims.is_contiguous() and not given.is_neg():
            return given
        if name in self.written:
            raise MXError(f"the input {name!r} is written to: pass it with the strides of the example")
        return in_memory_order(given.resolve_neg(), order)

    @cached_property
    def _flat(self) -> tuple[list[object], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, self.kwargs))

    @cached_property
    def _orders(self) -> list[list[int] | None]:
        return [memory_order(leaf) if isinstance(leaf, Tensor) else None for leaf in self._flat[0]]

    @cached_property
    def _conditions(self) -> list[tuple[str, Callable[[dict], bool]]]:
        # they come from the file that also holds the machine code
        return [(condition, eval(f"lambda L: {condition}", dict(SYMPY_INTERP))) for condition in self.guards]

    def _readable(self, condition: str) -> str:
        for i, name in enumerate(self.names):
            condition = condition.replace(f"L['flat_args'][{i}]", name)
        return re.sub(r"L\['(\w+)'\]", r"\1", condition).replace(".size()", ".shape")

    @property
    def _expected(self) -> str:
        positional = f"the arguments {', '.join(self.parameters)} in this order" if self.parameters else ""
        return " and ".join(filter(None, [positional, f"the keywords {', '.join(self.kwargs)}" if self.kwargs else ""]))


def _numbers(program: ExportedProgram) -> list[int]:
    """Return the indices of the leaves of the program's outputs that are numbers: constants or sizes."""
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    others = [i for i, spec in enumerate(specs) if not isinstance(spec.arg, TensorArgument)]
    return [i for i in others if getattr(specs[i].arg, "value", 0) is not None]


def check_leaf(
    name: str, given: object, example: object, extents: list[Range] | None, device: torch.device | None = None
) -> None:
    """Refuse a leaf of the arguments that the model does not take.

    Args:
        name: the name of the leaf, for the error.
        given: the leaf of a call.
        example: the leaf of the example.
        extents: its ranges, as in `Signature.ranges`.
        device: the device on which a tensor must be; by default any.

    Raises:
        MXError: for another type, dtype, shape or device, a number out of its range, or another constant.
    """
    if extents is None:
        if type(given) is not type(example) or given != example:
            raise MXError(
                f"the input {name!r} is the constant {example!r} of the export, and cannot be {_kind(given)}: export "
                "the model again for another value"
            )
        return
    if not isinstance(example, Tensor):
        if type(given) is not type(example) or not isinstance(given, int | float) or not _is_within([given], extents):
            raise MXError(f"the input {name!r} must be a number of {_shown(extents).rstrip(',')}, not {given!r}")
        return
    if not isinstance(given, Tensor) or not _fits(given, example, extents):
        raise MXError(
            f"the input {name!r} must be of shape ({_shown(extents)}) and {example.dtype}, not {_kind(given)}"
        )
    if device is not None and given.device != device:
        raise MXError(f"the input {name!r} must be on {device}, not on {given.device}: move it there")


#: tensors that hold their values themselves
_PLAIN = (Tensor, torch.nn.Parameter)


def _fits(given: Tensor, example: Tensor, extents: list[Range]) -> bool:
    plain = type(given) in _PLAIN and given.dtype == example.dtype and given.layout == torch.strided
    return plain and given.dim() == len(extents) and _is_within(given.shape, extents)


def _is_within(sizes: Iterable[float], extents: list[Range]) -> bool:
    return all(least <= n and (most is None or n <= most) for n, (least, most) in zip(sizes, extents, strict=True))


def _shown(extents: list[Range]) -> str:
    ranges = [f"{least}" if least == most else f"{least} to {most or 'any'}" for least, most in extents]
    return ", ".join(ranges) + ("," if len(ranges) == 1 else "")


def _kind(given: object) -> str:
    if isinstance(given, int | float | str | bool | None):
        return repr(given)
    if isinstance(given, Tensor) and type(given) in _PLAIN:
        return f"{tuple(given.shape)} {given.dtype}"
    return type(given).__name__


def _described(args: tuple, kwargs: dict) -> str:
    keywords = f" and the keywords {', '.join(kwargs)}" if kwargs else ""
    return f"{len(args)} positional arguments{keywords}"


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor from the one with the largest stride to the one with the least."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda i: (-strides[i], i))


def in_memory_order(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the tensor with its dimensions in this order in memory, without gaps or overlaps."""
    return tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])
