"""Nodes of a graph: their values, the attributes that they name, and the arguments of their calls.

A value is the `val` meta in an exported graph, or the `example_value` meta in one that torch.compile traced.
`Quantize.of(node)` returns the arguments of a `quantize_mx` node by name, defaults included, and None for any other
node. Its `args`, also after `dataclasses.replace`, can be assigned to a node's `args`.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from pt2mx.ops import attention, convolution, decoding, hadamard, linear, quantization, rope
from pt2mx.ops.contract import OPERATORS
from pt2mx.ops.operator import Operator
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from typing_extensions import Self

#: meta of a node that torch's passes keep for a new one; `from_node` goes to the node alone that has the same value
_KEPT = ("stack_trace", "nn_module_stack", "torch_fn")
#: meta key of the call of a `TrainEvalModule`: the operator that the module replaces
OPERATOR_KEY = "mx_operator"
#: cache: a call in a graph (`call_key`) -> its result
_RESULTS: WeakKeyDictionary[Graph, dict[tuple[object, ...], Any]] = WeakKeyDictionary()


def value_of(node: object) -> Any:
    """Return the fake tensor or symbolic size of a node; None if it is unknown."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None


def dtype_of(node: object) -> torch.dtype | None:
    """Return the dtype of a node's value; None if the value is no tensor."""
    value = value_of(node)
    return value.dtype if isinstance(value, Tensor) else None


def shape_of(node: object) -> tuple[int | str, ...] | None:
    """Return the shape of a node's value; None if the value is no tensor.

    Symbolic sizes are strings, so that comparing two shapes sets no guard.
    """
    value = value_of(node)
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape) if isinstance(value, Tensor) else None


def set_value(node: Node) -> None:
    """Set the `val` meta of a new node by running its operator on the `val` meta of its inputs, if all have it.

    Equal calls, as in the layers of a model, share one result: with symbolic sizes a call takes a millisecond.
    """
    if not all("val" in n.meta for n in node.all_input_nodes):
        return
    values = [n.meta["val"] for n in node.all_input_nodes]
    fakes = [value for value in values if isinstance(value, FakeTensor)]
    if (
        not fakes
        or not _gives_new_value(node.target)
        or any(fake.constant is not None for fake in fakes)
        or not all(isinstance(value, FakeTensor | int | torch.SymInt) for value in values)
    ):
        node.meta["val"] = result_of(node)
        return
    known, call = _RESULTS.setdefault(node.graph, {}), (fakes[0].fake_mode, *call_key(node))
    if call in known:
        node.meta["val"] = known[call]
        return
    node.meta["val"] = result = result_of(node)
    if free_unbacked_symbols(result) <= free_unbacked_symbols(values):  # no size depends on data
        known[call] = result


@functools.lru_cache(1024)
def _gives_new_value(target: object) -> bool:
    """Return whether the result of an operator is no argument that it writes."""
    return isinstance(target, OpOverload) and not any(
        one.alias_info is not None and one.alias_info.is_write for one in target._schema.returns
    )


def call_key(node: Node) -> tuple[object, ...]:
    """Return a key that calls of one operator share if their arguments differ in the data of tensors alone."""
    inputs = node.all_input_nodes
    numbers = {n: f"%{i}" for i, n in enumerate(inputs)}
    call = repr((node.target, torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__)))
    return call, *(_layout(value_of(n)) for n in inputs)


def _layout(value: object) -> object:
    if not isinstance(value, Tensor):
        return str(value)
    sizes = (size if isinstance(size, int) else size.node.expr for size in (*value.shape, *value.stride()))
    return (value.dtype, value.device, value.is_conj(), value.is_neg(), *sizes)


def inherit_location(node: Node, other: Node) -> None:
    """Give a new node the location in the model's source, and the module, of a node that it is computed for."""
    node.meta.update({key: other.meta[key] for key in _KEPT if key in other.meta})


def insert_before(place: Node, target: Callable[..., Any], *args: Any) -> Node:
    """Insert a call before a node, with that node's location and its own `val` meta, and return it."""
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args)
    inherit_location(node, place)
    set_value(node)
    return node


def insert_call(place: Node, call: Operator[Node]) -> Node:
    """Insert a call of an operator of pt2mx before a node, set its `val` meta, and return it."""
    return insert_before(place, call.overload, *call.args)


def result_of(node: Node, replaced: dict[Node, Any] | None = None) -> Any:
    """Run a node's operator on the values of its inputs, and return the result. `replaced` has other values for some
    inputs; the values of all others must be known."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: (replaced or {}).get(n, value_of(n)))
    fakes = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]
    # in C++ some operators, such as matmul of torch 2.11, refuse symbolic sizes
    symbolic = any(one._has_symbolic_sizes_strides for one in fakes)
    dispatcher = enable_python_dispatcher() if symbolic else nullcontext()
    with torch.no_grad(), dispatcher, fakes[0].fake_mode if fakes else nullcontext():
        return function_of(node)(*args, **kwargs)


def function_of(node: Node) -> Callable[..., Any]:
    """Return the function that a `call_function` node calls."""
    if isinstance(node.target, str):
        raise TypeError(f"{node} ({node.op}) calls no function")
    return node.target


def operator_of(node: Node) -> OpOverload:
    """Return the operator that a node calls."""
    if not isinstance(node.target, OpOverload):
        raise TypeError(f"{node} ({node.op}) calls no operator")
    return node.target


def args_of(node: Node) -> tuple[Any, ...]:
    """Return the positional arguments of a call. Each has the type that the operator's schema declares."""
    return node.args


def node_arg(node: Node, index: int = 0) -> Node:
    """Return the positional argument `index` of a call, which must be a node."""
    argument = node.args[index]
    if not isinstance(argument, Node):
        raise TypeError(f"argument {index} of {node} is no node: {argument!r}")
    return argument


def named_args(node: Node) -> dict[str, Any]:
    """Return all arguments of an operator's call by name, defaults included, in the order of the schema."""
    arguments = operator_of(node)._schema.arguments
    passed = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return {a.name: passed.get(a.name, a.default_value) for a in arguments}


def make_positional(node: Node, count: int = 0) -> None:
    """Make the keyword arguments of an operator's call positional where the schema allows it, and write out the
    defaults of the first `count` arguments. A higher-order operator has no schema, and does not change."""
    if not isinstance(node.target, OpOverload):
        return
    arguments = [a for a in node.target._schema.arguments if not a.kwarg_only]
    args, kwargs = list(node.args), dict(node.kwargs)
    last = max((i for i, a in enumerate(arguments) if a.name in kwargs), default=-1)
    for argument in arguments[len(args) : max(last + 1, count)]:
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def write_out_arguments(model: GraphModule) -> None:
    """Write out all arguments of pt2mx's operators, so that a saved graph keeps its meaning when a default changes.

    Tracing (`torch.export.export`, `run_decompositions`) leaves out arguments that equal their defaults.
    """
    changed = False
    for node in model.graph.nodes:
        count = written_count(operator_of(node)) if is_ours(node) else 0
        if len(node.args) < count:
            make_positional(node, count)
            changed = True
    if changed:
        model.recompile()


def written_count(overload: OpOverload) -> int:
    """Return the number of arguments that a call of an operator of pt2mx writes out at least."""
    declared = OPERATORS.get(overload._schema.name.removeprefix("pt2mx::"))
    return len(overload._schema.arguments) if declared is None else declared.written


def is_ours(node: Node) -> bool:
    """Return whether a node calls an operator of pt2mx."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "pt2mx"


def specs_of(node: Node) -> list[MXSpec]:
    """Return the specs of a node that calls an operator of pt2mx. Raise MXError for an element or a scale mode that
    this process does not know."""
    operator = OPERATORS.get(operator_of(node)._schema.name.removeprefix("pt2mx::"))
    if operator is None:
        return []
    call = operator.from_args(*named_args(node).values())
    values = [getattr(call, field.name) for field in fields(call)]  # type: ignore[arg-type]  # each is a dataclass
    return [value for value in values if isinstance(value, MXSpec)]


def called(node: Node) -> object:
    """Return the operator that a node calls, directly or as a `TrainEvalModule`; None for other nodes."""
    return node.target if node.op == "call_function" else node.meta.get(OPERATOR_KEY)


class OperatorCall(Operator[Node]):
    """The arguments of a node that calls an operator, in the fields of the operator's class; tensors are nodes."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments as a graph writes them out: without trailing ones of scales that are None."""
        args = super().args
        while len(args) > self.written and args[-1] is None:
            args = args[:-1]
        return args

    @classmethod
    def of(cls, node: Node) -> Self | None:
        """Return the arguments of a node that calls the operator; None for another node."""
        return cls.expect(node) if node.target is cls.overload else None

    @classmethod
    def expect(cls, node: Node) -> Self:
        """Return the arguments of a node that is known to call the operator."""
        if node.target is not cls.overload:
            raise TypeError(f"{node} does not call {cls.overload}")
        return cls.from_args(*named_args(node).values())

    @classmethod
    def calls_in(cls, graph: Graph) -> Iterator[tuple[Node, Self]]:
        """Yield the nodes of a graph that call the operator when iteration begins, each with its arguments at the time
        it is reached."""
        for node in graph.find_nodes(op="call_function", target=cls.overload):
            yield node, cls.expect(node)


class Quantize(OperatorCall, quantization.Quantize[Node]):
    """A call of `quantize_mx`."""


class FakeQuantize(OperatorCall, quantization.FakeQuantize[Node]):
    """A call of `fake_quantize_mx`."""


class Dequantize(OperatorCall, quantization.Dequantize[Node]):
    """A call of `dequantize_mx`."""


class AttentionMX(OperatorCall, attention.AttentionMX[Node]):
    """A call of `attention_mx`."""


class AttentionBfloat16(OperatorCall, attention.AttentionBfloat16[Node]):
    """A call of `attention_bfloat16`."""


class DecodingAttentionMX(OperatorCall, decoding.DecodingAttentionMX[Node]):
    """A call of `decoding_attention_mx`."""


class RotateQuantizeAndStore(OperatorCall, rope.RotateQuantizeAndStore[Node]):
    """A call of `rotate_quantize_and_store`."""


class LinearMX(OperatorCall, linear.LinearMX[Node]):
    """A call of `linear_mx`."""


class LinearMXMMALayout(OperatorCall, linear.LinearMXMMALayout[Node]):
    """A call of `linear_mx_mma_layout`."""


class NormedLinearMX(OperatorCall, decoding.NormedLinearMX[Node]):
    """A call of `normed_linear_mx`."""


class ResidualLinearMX(OperatorCall, decoding.ResidualLinearMX[Node]):
    """A call of `residual_linear_mx`."""


class GroupedLinearMX(OperatorCall, linear.GroupedLinearMX[Node]):
    """A call of `grouped_linear_mx`."""


class Conv2dMX(OperatorCall, convolution.Conv2dMX[Node]):
    """A call of `conv2d_mx`."""


class Hadamard(OperatorCall, hadamard.Hadamard[Node]):
    """A call of `hadamard`."""


class RotatedFakeQuantize(OperatorCall, hadamard.RotatedFakeQuantize[Node]):
    """A call of `rotated_fake_quantize_mx`."""


def model_of(graph: Graph) -> GraphModule:
    """Return the graph module that owns a graph."""
    if graph.owning_module is None:
        raise ValueError("a graph that is of no graph module has no parameters")
    return graph.owning_module


def name_of(node: Node) -> str:
    """Return the qualified name of the attribute that a `get_attr` node reads, or of the module that a `call_module`
    node calls."""
    if not isinstance(node.target, str):
        raise TypeError(f"{node} ({node.op}) names no attribute")
    return node.target


def called_module(node: Node) -> nn.Module | None:
    """Return the module that a `call_module` node calls; None for other nodes."""
    return model_of(node.graph).get_submodule(name_of(node)) if node.op == "call_module" else None


def attribute_of(model: GraphModule, node: Node) -> object:
    """Return the parameter, buffer or submodule that a `get_attr` node reads."""
    return operator.attrgetter(name_of(node))(model)


def tensor_of(model: GraphModule, node: Node) -> Tensor:
    """Return the parameter or buffer that a `get_attr` node reads."""
    tensor = attribute_of(model, node)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{node} reads no tensor but a {type(tensor).__name__}")
    return tensor


def register_buffer(model: GraphModule, name: str, value: Tensor) -> str:
    """Register a buffer under a qualified name, with a number if the name is taken, and return the name."""
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    unique = free_name(owner, attribute)
    owner.register_buffer(unique, value)
    return f"{path}.{unique}" if path else unique


def read_instead(model: GraphModule, name: str, old: Node) -> Node:
    """Insert a read of the buffer `name`, another layout of the tensor that a node reads, and return it with the meta
    of that node."""
    node = model.graph.get_attr(name)
    node.meta.update(old.meta)
    if "val" in old.meta:
        value = tensor_of(model, node)
        node.meta["val"] = old.meta["val"].new_empty(value.shape, dtype=value.dtype)
    return node


def parameter_of(codes: str) -> str:
    """Return the name of the parameter whose codes are in a buffer of that name.

    The layout of a lowered weight stays in the name, such as `_t`. After `_data` and `_rounded` a number is of
    `register_buffer`; before them it belongs to the parameter, such as `weight_1`.
    """
    path, dot, attribute = codes.rpartition(".")
    parameter, _, layout = attribute.rpartition("_data")
    if not parameter or layout[:1] not in ("", "_"):
        return codes
    return path + dot + re.sub(r"_rounded(_\d+)?$", "", parameter) + re.sub(r"_\d+(?=_|$)", "", layout)


def free_name(owner: object, name: str) -> str:
    """Return the name, with a number if `owner` has such an attribute."""
    unique, number = name, 0
    while hasattr(owner, unique):
        number += 1
        unique = f"{name}_{number}"
    return unique
