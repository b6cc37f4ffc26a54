"""Trace equal layers of a decoder once: an export copies the nodes of a layer instead of tracing the layers after it.

A trace with dynamic sizes takes most of the time of an export, and decoders have dozens of layers that differ in their
tensors alone. `repeated_layers` traces layers until two with equal modules and arguments have given the same nodes,
each with the tensors of its own layer. It then copies these nodes for every later layer that is equal to them.

Layers also differ in their number, `layer_idx`, by which they find their part of a cache. While a layer is traced, its
number is a `LayerNumber`, which tells whether the layer has read it for anything else. Such a layer is no template.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy, map_arg
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

#: what the names of modules begin with in a trace of torch.export
_ROOT = "_export_root."
_SYMBOLIC = torch.SymInt, torch.SymBool, torch.SymFloat
#: fewer layers are traced one by one
_FEWEST = 4
#: layers of several kinds alternate with at most this period
_PERIOD = 8
#: the attribute of modules with the number of their layer
_NUMBER = "layer_idx"
#: attributes of a module that may differ between equal layers, or that `_alike` compares by themselves
_NOT_COMPARED = {_NUMBER, "_parameters", "_buffers", "_modules"}


class LayerNumber:
    """The number of a layer, which remembers that code has computed with it, compared or printed it, or used it as an
    index. It is no `int`: lists read those without a call."""

    def __init__(self, number: int) -> None:
        self._number, self.is_read = number, False

    def __index__(self) -> int:
        self.is_read = True
        return self._number

    @staticmethod
    def plain(number: Any) -> Any:
        """Return a number for a cache, which is no read: its tensors are operands of the layer."""
        return number._number if isinstance(number, LayerNumber) else number


def _add_operators() -> None:
    """Give `LayerNumber` the operators of `int`, each of which is a read."""

    def of_one(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *options: function(operator.index(self), *options)

    def of_two(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        plain = LayerNumber.plain
        return (
            lambda self, other: function(operator.index(self), plain(other)),
            lambda self, other: function(plain(other), operator.index(self)),
        )

    for function in (hash, bool, int, float, complex, repr, format, abs, round):
        setattr(LayerNumber, f"__{function.__name__}__", of_one(function))
    for name in ("neg", "pos", "invert"):
        setattr(LayerNumber, f"__{name}__", of_one(getattr(operator, name)))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(LayerNumber, f"__{name}__", of_two(getattr(operator, name))[0])
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
        left, right = of_two(getattr(operator, name))
        setattr(LayerNumber, f"__{name.strip('_')}__", left)
        setattr(LayerNumber, f"__r{name.strip('_')}__", right)


_add_operators()


class _Trace(NamedTuple):
    """A traced layer.

    Args:
        number: of the layer.
        operands: the arguments of the layer, then its tensors; a tensor as its node, which may have other users.
        kinds: the dtype, sizes and strides of each operand that is a tensor.
        nodes: the nodes that the trace added.
        results: the leaves that the layer returned, and the nodes of those that are tensors.
        spec: the structure of the results.
    """

    number: int
    operands: list[Any]
    kinds: list[str]
    nodes: list[Node]
    results: list[tuple[Any, Node | None]]
    spec: pytree.TreeSpec


@contextmanager
def repeated_layers(
    model: nn.Module, prefix: str, cached: Callable[[int], Sequence[Tensor]] = lambda number: ()
) -> Iterator[list[str]]:
    """Copy the nodes of equal layers in exports within the context; it yields the names of the copied layers so far.

    Two layers count as equal if their modules and arguments are, and if they do not read their number. A layer whose
    code knows it from elsewhere, as by the identity of a module, may be wrong: compare the program with the model.

    Args:
        model: a model with its layers in lists (`ModuleList`). The layers get another `forward` within the context.
        prefix: what the names of the model's modules begin with in the exported module.
        cached: returns further tensors that the layer of a number reads or writes.
    """
    copied: list[str] = []
    with ExitStack() as stack:
        for name, layers in model.named_modules():
            if isinstance(layers, nn.ModuleList) and len(set(layers)) == len(layers) >= _FEWEST:
                copier = _Copier(layers, f"{prefix}{name}", cached, copied)
                for number, layer in enumerate(layers):
                    if "forward" not in vars(layer):  # otherwise somebody else replaced it
                        layer.forward = partial(copier.forward, number, layer.forward)
                        stack.callback(delattr, layer, "forward")
        yield copied


def traced_layers(*args: Any) -> AbstractContextManager[list[str]]:
    """Trace all layers: the counterpart of `repeated_layers`, with its arguments."""
    return nullcontext([])


class _Copier:
    """The layers of a list during an export."""

    def __init__(
        self, layers: nn.ModuleList, path: str, cached: Callable[[int], Sequence[Tensor]], copied: list[str]
    ) -> None:
        self.layers, self.path, self.cached, self.copied = layers, path, cached, copied
        self.tracer: Any = None
        self.traces: list[_Trace] = []
        self.templates: list[_Trace] = []  #: traces whose nodes are copied

    def forward(self, number: int, trace: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer: copy the nodes of the template, or trace."""
        mode = get_proxy_mode()
        if mode is None:
            return trace(*args, **kwargs)
        if self.tracer is not mode.tracer:
            self.tracer, self.traces, self.templates = mode.tracer, [], []
        layer = self.layers[number]
        arguments = pytree.tree_leaves((args, kwargs), is_leaf=_is_leaf)
        leaves = [*arguments, *self.cached(number), *layer.parameters(), *layer.buffers()]
        operands = [self._node_of(leaf) or leaf for leaf in leaves]
        kinds = [_kind(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        for template in self.templates:
            if self._fits(template, number, operands, kinds):
                return self._copy(template, number, operands)
        count = len(self.tracer.graph.nodes)
        with _tracked_numbers(layer) as numbers:
            output = trace(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(output)
        nodes = list(self.tracer.graph.nodes)[count:]
        results = [(leaf, self._node_of(leaf)) for leaf in leaves]
        if any(one.is_read for one in numbers):
            return output
        if all(isinstance(leaf, Tensor) == (node is not None) for leaf, node in results):
            traced = _Trace(number, operands, kinds, nodes, results, spec)
            earlier = [one for one in self.traces[-_PERIOD:] if self._fits(one, number, operands, kinds)]
            if earlier and _equal(earlier[-1], traced):
                self.templates.append(traced)
            self.traces.append(traced)
        return output

    def _node_of(self, leaf: Any) -> Node | None:
        """Return the node of a tensor in the trace; None for what has none."""
        slot = get_proxy_slot(leaf, self.tracer, None) if isinstance(leaf, Tensor) else None
        return None if slot is None else slot.proxy.node

    def _fits(self, other: _Trace, number: int, operands: list[Any], kinds: list[str]) -> bool:
        """Return whether a layer and its operands are like those of another layer, apart from their values."""
        if len(operands) != len(other.operands) or kinds != other.kinds:
            return False
        constants = ((a, b) for a, b in zip(operands, other.operands, strict=True) if not isinstance(a, Node))
        return (
            _first_positions(operands) == _first_positions(other.operands)
            and all(_equal_values(a, b) for a, b in constants)
            and _alike(self.layers[number], self.layers[other.number])
        )

    def _copy(self, template: _Trace, number: int, operands: list[Any]) -> Any:
        """Copy the nodes of the template with the operands of another layer, and return its results."""
        copies: dict[Node, Node] = {
            old: new for old, new in zip(template.operands, operands, strict=True) if isinstance(old, Node)
        }
        old_path, new_path = (f"{_ROOT}{self.path}.{n}" for n in (template.number, number))
        self.copied.append(f"{self.path}.{number}")
        for node in template.nodes:
            copy = self.tracer.graph.node_copy(node, lambda operand: copies.get(operand, operand))
            copy.meta["nn_module_stack"] = {
                _renamed(key, old_path, new_path): (_renamed(name, old_path, new_path), kind)
                for key, (name, kind) in node.meta["nn_module_stack"].items()
            }
            copies[node] = copy
        results = [
            leaf if node is None else self._traced(leaf, copies.get(node, node)) for leaf, node in template.results
        ]
        return pytree.tree_unflatten(results, template.spec)

    def _traced(self, like: Tensor, node: Node) -> Tensor:
        """Return a tensor of the same kind that is the value of a node."""
        with disable_proxy_modes_tracing():
            result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        set_proxy_slot(result, self.tracer, _ProxyTensor(Proxy(node, self.tracer), None))
        return result


@contextmanager
def _tracked_numbers(layer: nn.Module) -> Iterator[list[LayerNumber]]:
    """Replace the numbers of a layer's modules by ones that remember whether they were read."""
    numbers = [(module, vars(module).get(_NUMBER)) for module in layer.modules()]
    tracked = [(module, LayerNumber(number)) for module, number in numbers if type(number) is int]
    for module, number in tracked:
        setattr(module, _NUMBER, number)
    try:
        yield [number for _, number in tracked]
    finally:
        for module, number in tracked:
            setattr(module, _NUMBER, LayerNumber.plain(number))


def _is_leaf(argument: Any) -> bool:
    """Return whether an argument is a single object: a cache is, too.

    transformers' exporters register caches with pytree, which would take the tensors of all layers out of them."""
    return not isinstance(argument, (tuple, list, dict))


def _renamed(name: str, old: str, new: str) -> str:
    """Return the name of a module with the path of another layer."""
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()} {tensor.device}"


def _first_positions(operands: list[Any]) -> list[int]:
    """Return for each operand the first position of the same node; -1 for what is no node."""
    first: dict[Node, int] = {}
    return [first.setdefault(one, i) if isinstance(one, Node) else -1 for i, one in enumerate(operands)]


def _alike(layer: nn.Module, other: nn.Module) -> bool:
    """Return whether two layers differ in the values of their tensors alone, and in their numbers."""

    def named(layer: nn.Module) -> list[tuple[str, type]]:
        return [(name, type(module)) for name, module in layer.named_modules()]

    def tensors(layer: nn.Module) -> list[tuple[str, str]]:
        return [(name, _kind(one)) for name, one in [*layer.named_parameters(), *layer.named_buffers()]]

    def attributes(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in _NOT_COMPARED}

    if named(layer) != named(other) or tensors(layer) != tensors(other):
        return False
    for a, b in zip(layer.modules(), other.modules(), strict=True):
        values, others = attributes(a), attributes(b)
        if a is layer:  # `repeated_layers` replaced the method of the layer itself
            del values["forward"], others["forward"]
        if values.keys() != others.keys() or not all(_equal_values(values[name], others[name]) for name in values):
            return False
    return True


def _equal_values(a: Any, b: Any) -> bool:
    """Return whether two attributes or arguments are equal: modules and tensors, in containers too, only if they are
    the same."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_equal_leaves, leaves, others))


def _equal_leaves(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b) or isinstance(a, nn.Module | Tensor):
        return a is b
    if isinstance(a, _SYMBOLIC):  # their equality would become a condition of the program
        return str(a) == str(b)
    if isinstance(a, partial):
        return a.func == b.func and _equal_values((a.args, a.keywords), (b.args, b.keywords))
    try:
        with _disable_current_modes():  # an object may compare its tensors, which is no part of the program
            return bool(a == b)
    except Exception:  # such as for arrays
        return False


def _equal(trace: _Trace, other: _Trace) -> bool:
    """Return whether two layers have given the same nodes, apart from their operands."""

    def described(trace: _Trace) -> list[Any]:
        known: dict[Node, Any] = {}
        for position, operand in enumerate(trace.operands):
            if isinstance(operand, Node):
                known.setdefault(operand, f"operand {position}")

        def name(node: Node) -> Any:
            if isinstance(value := node.meta.get("val"), _SYMBOLIC):
                return str(value)  # a size may be read of any tensor that has it
            return known.get(node, node)  # what no layer owns has to be the same node

        nodes = [node for node in trace.nodes if not isinstance(node.meta.get("val"), _SYMBOLIC)]
        known |= {node: f"node {number}" for number, node in enumerate(nodes)}
        calls = [(node.target, map_arg(node.args, name), map_arg(node.kwargs, name)) for node in nodes]
        return [*calls, *(name(node) for _, node in trace.results if node is not None)]

    def constants(trace: _Trace) -> Any:
        return pytree.tree_unflatten([leaf if node is None else None for leaf, node in trace.results], trace.spec)

    copied = all(node.op == "call_function" and not free_unbacked_symbols(_values(node)) for node in trace.nodes)
    return copied and described(trace) == described(other) and _equal_values(constants(trace), constants(other))


def _values(node: Node) -> list[Any]:
    return [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, (Tensor, *_SYMBOLIC))]
