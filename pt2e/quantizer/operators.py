"""The table of quantizable operators: which arguments are quantized, and along which dimension their blocks run. The
report lists others that look like matmuls (`is_matmul_like`).

A new operator is a new row. The block axis is the dimension that the operator reduces, so that a scale can be factored
out of each partial sum (OCP MX v1.0, section 6.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from pt2mx import ops
from pt2mx.fx.graph.convolution import CONVOLUTIONS
from pt2mx.fx.graph.node import args_of, called, node_arg, shape_of
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.pt2e.observe.qspec import CONFIG_KEY


@dataclass(frozen=True)
class Operand:
    """One argument of an operator.

    The role "operand" means "weight" for a constant tensor and "activation" for a computed one.

    Args:
        name: in a config.
        position: among the arguments.
        role: a field of the config.
        axis: the block axis.
        item: index where the argument at that position is a list of tensors.
    """

    name: str
    position: int
    role: str
    axis: int
    item: int | None = None


#: the operands of an operator, or a function that finds them for a call
Row = tuple[Operand, ...] | Callable[[Node], tuple[Operand, ...]]


def _factors(first: int, axes: tuple[int, int]) -> tuple[Operand, ...]:
    """Return the operands of a matmul, its arguments `first` and `first + 1`, with their block axes."""
    return Operand("input", first, "operand", axes[0]), Operand("other", first + 1, "operand", axes[1])


# for a vector, axis -2 is its only dimension
_MATMUL = _factors(0, (-1, -2))
# addmm(bias, x, weight): Hugging Face's Conv1D among others, whose weight is (in, out)
_ADD_MATMUL = (*_factors(1, (-1, -2)), Operand("bias", 0, "bias", -1))
_ELEMENTWISE = _factors(0, (-1, -1))
_LINEAR = (
    Operand("input", 0, "activation", -1),
    Operand("weight", 1, "weight", -1),
    Operand("bias", 2, "bias", -1),
)
# the reduced dimensions; `pt2mx.pt2e.quantizer.annotate` moves the blocks of `value` to the head dimension
_ATTENTION = (
    Operand("query", 0, "activation", -1),
    Operand("key", 1, "activation", -1),
    Operand("value", 2, "activation", -2),
)
#: gathered rows; blocks run along a row, so that it can be gathered before it is dequantized
ROWS = (Operand("weight", 0, "weight", -1),)


def convolution_operands(dimensions: int, weight_axis: int) -> tuple[Operand, ...]:
    """Return the operands of a convolution. Channels are counted from the end, because the input may lack a batch
    dimension."""
    return (
        Operand("input", 0, "activation", -1 - dimensions),
        Operand("weight", 1, "weight", weight_axis),
        Operand("bias", 2, "bias", -1),
    )


def _convolution(node: Node) -> tuple[Operand, ...]:
    target: Any = called(node)
    args, kind = args_of(node), CONVOLUTIONS.get(target)
    dimensions, transposed = (len(args[3]), args[6]) if kind is None else kind  # aten.convolution has none
    if transposed:  # the weight is (in, out / groups, *kernel)
        return convolution_operands(dimensions, 0)
    channels = (shape_of(args[0]) or (1,) * (1 + dimensions))[-1 - dimensions]
    return convolution_operands(dimensions, reduced_axis(shape_of(args[1]) or (), is_grouped=channels != 1))


def reduced_axis(weight: Sequence[object], is_grouped: bool) -> int:
    """Return the block axis of a convolution's weight, (out, in / groups, *kernel): the input channels.

    A depthwise convolution has one channel a group and reduces only taps: return its last kernel dimension above 1.
    """
    if not is_grouped or len(weight) < 3 or weight[1] != 1:
        return 1
    return next((axis for axis in range(len(weight) - 1, 1, -1) if weight[axis] != 1), 1)


def _convolution_accumulated(node: Node) -> tuple[Operand, ...]:
    args = args_of(node)
    return convolution_operands(len(args[3]), reduced_axis(shape_of(args[1]) or (), is_grouped=args[6] != 1))


def _vecdot(node: Node) -> tuple[Operand, ...]:
    """linalg_vecdot(x, y, *, dim=-1)."""
    dim: Any = node.kwargs.get("dim", -1)
    return _factors(0, (dim, dim))


def _tensordot(node: Node) -> tuple[Operand, ...]:
    """tensordot(x, y, dims_x, dims_y): the last pair of reduced dimensions; none for an outer product."""
    dims_x, dims_y = args_of(node)[2:4]
    return _factors(0, (dims_x[-1], dims_y[-1])) if dims_x else ()


def _einsum(node: Node) -> tuple[Operand, ...]:
    """Return the factors, two items of argument 1; none where the equation is no matmul of two tensors."""
    axes = einsum_axes(node)
    if axes is None:
        return ()
    return Operand("input", 1, "operand", axes[0], item=0), Operand("other", 1, "operand", axes[1], item=1)


def einsum_axes(node: Node) -> tuple[int, int] | None:
    """einsum(equation, [x, y]): of the labels that it reduces the last in x, the one closest in memory.

    None where it is no matmul of two tensors, reduces no label of both, or takes a diagonal of one.
    """
    equation, tensors = args_of(node)[:2]
    terms, arrow, output = equation.replace(" ", "").partition("->")
    terms = terms.split(",")
    labels = [term.replace(".", "") for term in terms]
    if len(tensors) != 2 or any(len(set(term)) < len(term) for term in labels):
        return None
    if arrow:
        reduced = [label for label in labels[0] if label in labels[1] and label not in output]
    else:  # shared labels are reduced
        reduced = [label for label in labels[0] if label in labels[1]]
    return (_axis(terms[0], reduced[-1]), _axis(terms[1], reduced[-1])) if reduced else None


def einsum_free_axis(node: Node, item: int) -> int | None:
    """Return the last dimension of an einsum's factor that the other factor lacks; None if there is none."""
    terms = args_of(node)[0].replace(" ", "").partition("->")[0].split(",")
    term, other = terms[item], terms[1 - item]
    free = [label for label in term.replace(".", "") if label not in other]
    return _axis(term, free[-1]) if free else None


def _axis(term: str, label: str) -> int:
    """Return the dimension of a label, counted from the end if it follows an ellipsis, else from the front."""
    head, _, tail = term.partition("...")
    return tail.index(label) - len(tail) if label in tail else head.index(label)


def _rnn(node: Node) -> tuple[Operand, ...]:
    """The parameters come in one list, direction by direction, layer by layer. The hidden state is internal."""
    parameters, has_biases, layers, bidirectional = (args_of(node)[i] for i in (2, 3, 4, 7))
    names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if has_biases else ()), "weight_hr")
    each = len(parameters) // (layers * (2 if bidirectional else 1))
    items = [(names[i % each], i) for i in range(len(parameters))]
    return _RNN_INPUT, *(Operand(name, 2, name.partition("_")[0], -1, i) for name, i in items)


_RNN_INPUT = Operand("input", 0, "activation", -1)
_CELL = (
    _RNN_INPUT,
    Operand("weight_ih", 2, "weight", -1),
    Operand("weight_hh", 3, "weight", -1),
    Operand("bias_ih", 4, "bias", -1),
    Operand("bias_hh", 5, "bias", -1),
)
# the hidden state is only a matmul input, except in a GRU, which also mixes it into its output
_CELL_HIDDEN = (*_CELL, Operand("hidden", 1, "activation", -1))
_LSTM_CELL = (*_CELL, Operand("hidden", 1, "activation", -1, 0))

#: matmuls of rows that are sorted by expert: (tokens, in) x (experts, in, out), and the ends of the experts' rows
GROUPED: dict[str, Row] = {
    "aten._grouped_mm": (*_MATMUL, Operand("bias", 3, "bias", -1)),
    "transformers.grouped_mm_fallback": _MATMUL,
}

#: name of an operator (`operator_name`) -> its operands
OPERANDS: dict[str, Row] = {
    "aten.linear": _LINEAR,
    "aten.bilinear": (
        Operand("input", 0, "activation", -1),
        Operand("other", 1, "activation", -1),
        Operand("weight", 2, "weight", -1),  # (out, in of input, in of other)
        Operand("bias", 3, "bias", -1),
    ),
    "aten.addmm": _ADD_MATMUL,
    "aten.addbmm": _ADD_MATMUL,
    "aten.baddbmm": _ADD_MATMUL,
    "aten.addmv": _ADD_MATMUL,
    "aten.mm": _MATMUL,
    "aten.bmm": _MATMUL,
    "aten.matmul": _MATMUL,
    "aten.linalg_matmul": _MATMUL,
    "aten.mv": _MATMUL,
    "aten.dot": _MATMUL,
    "aten.vdot": _MATMUL,
    "aten.inner": _ELEMENTWISE,
    "aten.linalg_vecdot": _vecdot,
    "aten.tensordot": _tensordot,
    "aten.einsum": _einsum,
    **GROUPED,
    **dict.fromkeys(("aten.conv1d", "aten.conv1d.padding", "aten.conv2d", "aten.conv2d.padding"), _convolution),
    **dict.fromkeys(("aten.conv3d", "aten.conv3d.padding", "aten.conv_transpose1d"), _convolution),
    **dict.fromkeys(("aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), _convolution),
    "aten.convolution": _convolution,  # decomposed convolutions
    "aten.conv_tbc": (_RNN_INPUT, Operand("weight", 1, "weight", 1), Operand("bias", 2, "bias", -1)),
    "aten.lstm.input": _rnn,
    "aten.gru.input": _rnn,
    "aten.rnn_tanh.input": _rnn,
    "aten.rnn_relu.input": _rnn,
    "aten.lstm_cell": _LSTM_CELL,
    "aten.gru_cell": _CELL,
    "aten.rnn_tanh_cell": _CELL_HIDDEN,
    "aten.rnn_relu_cell": _CELL_HIDDEN,
    "aten.scaled_dot_product_attention": _ATTENTION,
    "aten._scaled_dot_product_flash_attention_for_cpu": _ATTENTION,
    "flex_attention": _ATTENTION,
    "aten.embedding": ROWS,
    "aten.embedding_bag": ROWS,
    "aten.embedding_bag.padding_idx": ROWS,
}

#: the operators of a converted model whose config names an accumulator
ACCUMULATED: dict[str, Row] = {
    "pt2mx.linear_accumulated": _LINEAR,
    "pt2mx.matmul_accumulated": (*_MATMUL, Operand("bias", 2, "bias", -1)),
    "pt2mx.convolution_accumulated": _convolution_accumulated,
    "pt2mx.attention_accumulated": _ATTENTION,
}

#: the write of a decoder to its cache, (B, heads, S, width); quantized only by `MXQuantizer.set_kv_cache`
CACHE_WRITE = "aten.index_copy_"

#: operators that are quantized only where a setting names them: residual additions, gates, a cache
OPT_IN: dict[str, Row] = {
    "aten.add.Tensor": _ELEMENTWISE,
    "aten.mul.Tensor": _ELEMENTWISE,
    CACHE_WRITE: (Operand("source", 3, "activation", -1),),
}

#: the names that a config's `operands` may have
OPERAND_NAMES = ("input", "other", "weight", "bias", "query", "key", "value", "hidden", "source") + (
    "weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh",
)  # fmt: skip


@functools.cache
def operator_name(target: object) -> str:
    """Return `aten.linear` for `torch.ops.aten.linear.default`; other overloads keep theirs; "" for no operator."""
    return str(target).removesuffix(".default") if isinstance(target, _OPERATORS) else ""


def names_of(name: str) -> tuple[str, ...]:
    """Return the names by which a setting can mean an operator: without its overload, and with it."""
    return tuple(dict.fromkeys((".".join(name.split(".")[:2]), name)))


_OPERATORS = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)


def quantizable_operators(graph: Graph, requested: Set[str] | None = None) -> list[Node]:
    """Return the calls of the operators in `OPERANDS`, and of the operators in `OPT_IN` that `requested` names.

    The default selects the calls in `OPT_IN` that a setting chose and that have a quantized operand.
    """
    opted = [name for name in OPT_IN if requested is None or not requested.isdisjoint(names_of(name))]
    targets = {node: called(node) for node in graph.nodes}
    names = {node: operator_name(target) for node, target in targets.items()}
    always = {**OPERANDS, **ACCUMULATED}
    quantizable = [n for n, name in names.items() if name in always or name in opted]
    return [n for n in quantizable if names[n] in always or requested is not None or _is_quantized(n)]


def operands_of(node: Node) -> tuple[Operand, ...]:
    """Return the operands of one call of a quantizable operator; none where the call is no matmul."""
    name = operator_name(called(node))
    row = OPERANDS.get(name) or ACCUMULATED.get(name) or OPT_IN[name]
    return row(node) if callable(row) else row


def reduces(node: Node) -> bool:
    """Return True for a quantizable operator that adds products, and so has an accumulator."""
    name = operator_name(called(node))
    return name not in OPT_IN and OPERANDS.get(name) is not ROWS


def fixed_operands(name: str) -> tuple[Operand, ...]:
    """Return the operands of an operator whose calls all have the same, by its name."""
    row = OPERANDS[name]
    if callable(row):
        raise TypeError(f"the operands of {name} depend on its arguments")
    return row


def argument_of(node: Node, operand: Operand) -> Node | None:
    """Return the argument of a call that is `operand`, None where it is absent."""
    args: tuple[Any, ...] = node.args
    argument = args[operand.position] if operand.position < len(args) else None
    if operand.item is not None and argument is not None:
        argument = argument[operand.item]
    return argument if isinstance(argument, Node) else None


def arguments_of(node: Node) -> list[tuple[Operand, Node | None]]:
    """Return the operands of a call, each with the argument that it is; None where the argument is absent."""
    return [(operand, argument_of(node, operand)) for operand in operands_of(node)]


def replace_argument(node: Node, operand: Operand, new: Node) -> None:
    """Make a call read `new` as `operand`."""
    if operand.item is None:
        node.update_arg(operand.position, new)
        return
    items = list(args_of(node)[operand.position])
    items[operand.item] = new
    node.update_arg(operand.position, items)


def gather_of(argument: Node | None, operand: Operand) -> Node | None:
    """Return the argument that is `operand` if it is gathered from the rows of a parameter, and only one call uses it.

    A router selects experts like this (`weight[ids] @ x`). The parameter is quantized then, and not the gathered rows.
    """
    if argument is None or argument.target is not torch.ops.aten.index.Tensor or len(argument.users) > 1:
        return None
    source, indices = args_of(argument)
    is_parameter = source.op in ("get_attr", "call_module") or source.target is ops.dequantize_mx
    value = source.meta.get("val")
    blocked = isinstance(value, torch.Tensor) and value.dim() > -operand.axis > 0  # not along the gathered axis
    return argument if is_parameter and blocked and len(indices) == 1 else None


def operand_node(node: Node, operand: Operand) -> Node | None:
    """Return the node that is quantized for `operand`, None where the argument is absent."""
    argument = argument_of(node, operand)
    gather = gather_of(argument, operand)
    return argument if gather is None else node_arg(gather)


def role_of(operand: Operand, argument: Node, constants: set[Node]) -> str:
    """Return the config field with the operand's spec; `constants` are the constant nodes of the graph."""
    if operand.role != "operand":
        return operand.role
    return "weight" if _quantized_tensor(argument) in constants else "activation"


def _quantized_tensor(argument: Node) -> Node:
    """Return the tensor behind an observer, a quantize-dequantize pair or packed buffers; else the argument."""
    if argument.op == "call_module":
        return node_arg(argument)
    if (quantize := quantize_of(argument)) is not None:
        return node_arg(quantize)
    return node_arg(argument) if argument.target is ops.dequantize_mx else argument


def _is_quantized(node: Node) -> bool:
    inputs = node.all_input_nodes
    return CONFIG_KEY in node.meta and any(n.op == "call_module" or n.target is ops.dequantize_mx for n in inputs)


#: an operator with one of these words in its name is matmul-like, also a custom one (`mylib::grouped_mm`) or one of a
#: later torch ...
_WORDS = frozenset({
    "mm", "addmm", "bmm", "addbmm", "baddbmm", "mv", "addmv", "smm", "hspmm", "sspaddmm", "matmul", "gemm", "gemv",
    "dot", "vdot", "vecdot", "inner", "tensordot", "einsum", "linear", "bilinear", "trilinear", "cdist", "euclidean",
    "conv", "conv1d", "conv2d", "conv3d", "convolution", "lstm", "gru", "rnn", "attention", "transformer",
})  # fmt: skip
#: ... unless its name also has one of these: it prepares a matmul, or belongs to the derivative of one
_HELPERS = frozenset({"backward", "flatten", "reorder", "prepack", "pack", "quantize", "search"})


def is_matmul_like(target: object) -> bool:
    """Return True if a call's target is a matmul, convolution, recurrent layer, attention, or vector distance."""
    namespace, _, name = operator_path(target).partition(".")
    words = frozenset(name.split("_"))
    return namespace != "pt2mx" and bool(words & _WORDS) and not words & _HELPERS


def operator_path(target: object) -> str:
    """Return `aten.conv2d` for every overload of it, `higher_order.flex_attention`; "" for no operator of torch."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    return ""
