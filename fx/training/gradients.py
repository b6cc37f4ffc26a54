"""Operators whose gradients are products of quantized tensors, as MX hardware computes them in training.

The forward pass is the operator's own. The backward pass of a matmul y = a @ b has two products, and each reduces
another dimension. Both factors of each product are quantized along that dimension: the gradient in a format of its own,
the other operand, from its float values, in the format of the forward pass. So `pt2mx.microxcaling` does, to the bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn.functional import pad

from pt2mx import products
from pt2mx.fx.graph.convolution import Convolution
from pt2mx.fx.graph.node import make_positional, name_of, named_args, node_arg, operator_of, shape_of, value_of
from pt2mx.fx.training.train_eval import TrainEvalModule, replace_by_module
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.quantization import FakeQuantize
from pt2mx.products import Product, Products
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: meta key of an operator's node: its `QuantizedGradients`, until they are inserted
GRADIENTS_KEY = "mx_gradients"


@dataclass(frozen=True)
class GradientFormat:
    """How the factors of backward products are quantized.

    Args:
        spec: of the gradient; its axis does not matter.
        rotation: values of both factors that a Hadamard matrix rotates together first, a power of two; 1 for none.
        activation: of probabilities that an attention computes inside; None: high precision.
    """

    spec: MXSpec
    rotation: int = 1
    activation: MXSpec | None = None


@dataclass(frozen=True)
class QuantizedProduct:
    """A backward product of quantized factors; `specs` are those of the gradient and of the other factor."""

    product: Product
    specs: tuple[MXSpec | None, MXSpec | None]
    rotation: int

    @classmethod
    def of(
        cls, product: Product, how: GradientFormat, other: MXSpec | None, rotation: int | None = None
    ) -> QuantizedProduct:
        of_grad, of_other = product.axes
        specs = how.spec.replace(axis=of_grad), None if other is None else other.replace(axis=of_other)
        return cls(product, specs, how.rotation if rotation is None else rotation)

    def __call__(self, grad: Tensor, other: Tensor, shape: tuple[int, ...], **call: Any) -> Tensor:
        """Return the gradient of an operand of this shape."""
        factors = zip((grad, other), self.specs, self.product.axes, strict=True)
        quantized = [self._quantized(x, spec, axis).to(grad.dtype) for x, spec, axis in factors]
        return self.product.compute(*quantized, shape, **call)

    def _quantized(self, x: Tensor, spec: MXSpec | None, axis: int) -> Tensor:
        if self.rotation > 1:  # zeros fill the last block: they add nothing to the product
            after = -1 - axis if axis < 0 else x.dim() - 1 - axis
            x = pad(x, [0, 0] * after + [0, -x.shape[axis] % self.rotation])
            x = hadamard(x, self.rotation, axis)
        # not `fake_quantize_mx`: torch.compile does not trace what checks tensors in a backward pass
        return x if spec is None else FakeQuantize(x, spec, None, "identity").call()


@dataclass(frozen=True)
class QuantizedGradients(ABC):
    """An operator, and the quantized products of its gradients.

    Args:
        operator, keywords: what the forward pass calls.
        positions: the arguments that the products multiply.
    """

    operator: OpOverload
    keywords: tuple[tuple[str, Any], ...]
    positions: tuple[int, ...]

    def __call__(self, args: Sequence[Any], sources: Sequence[Tensor]) -> Tensor:
        """Call the operator.

        Args:
            args: its positional arguments, quantized.
            sources: the arguments at `positions` before they were quantized. If none was (fake quantization is off),
                the gradients are the operator's own.
        """
        if all(args[position] is source for position, source in zip(self.positions, sources, strict=False)):
            return self.operator(*args, **dict(self.keywords))
        return _Function.apply(self, len(args), *args, *sources)

    @abstractmethod
    def saved(self, needs: Sequence[bool], args: Sequence[Any], sources: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the tensors that `backward` reads, where the arguments that `needs` marks need gradients."""

    @abstractmethod
    def backward(
        self, grad: Tensor, saved: Sequence[Any], shapes: Sequence[Any], needs: Sequence[bool]
    ) -> dict[int, Tensor]:
        """Return the gradients by position; `shapes` are those of the arguments."""


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: QuantizedGradients, count: int, *tensors: Any) -> Tensor:
        args, sources = tensors[:count], tensors[count:]
        ctx.gradients, ctx.sources = gradients, len(sources)
        ctx.shapes = [x.shape if isinstance(x, Tensor) else None for x in args]
        ctx.save_for_backward(*gradients.saved(ctx.needs_input_grad[2:], args, sources))
        y = gradients.operator(*args, **dict(gradients.keywords))
        return aten._unsafe_view.default(y, y.shape)  # autograd forbids writes (`relu_`) to views that a function makes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2 : 2 + len(ctx.shapes)]
        grads = ctx.gradients.backward(grad, ctx.saved_tensors, ctx.shapes, needs)
        of_args = [grads.get(position) for position in range(len(ctx.shapes))]
        return None, None, *of_args, *[None] * ctx.sources


@dataclass(frozen=True)
class MatmulGradients(QuantizedGradients):
    """Of a matmul or convolution of two operands.

    Args:
        products: the gradients of the operands.
        call: further arguments of the products.
        bias: the position of an argument that is added.
        rank: dimensions of the gradient and of the first operand that the products take at least.
        factors: of the matmul, and of the bias.
        channel: the dimension, from the end, of the values of a bias.
    """

    products: tuple[QuantizedProduct, QuantizedProduct]
    call: tuple[tuple[str, Any], ...] = ()
    bias: int | None = None
    rank: int = 0
    factors: tuple[float, float] = (1, 1)
    channel: int = -1

    def saved(self, needs: Sequence[bool], args: Sequence[Any], sources: Sequence[Tensor]) -> list[Tensor | None]:
        first, second = self.positions
        return [sources[0] if needs[second] else None, sources[1] if needs[first] else None]

    def backward(
        self, grad: Tensor, saved: Sequence[Any], shapes: Sequence[Any], needs: Sequence[bool]
    ) -> dict[int, Tensor]:
        (a, b), (first, second), call = saved, self.positions, dict(self.call)
        of_first, of_second = self.products
        missing = max(self.rank - grad.dim(), 0)
        grad = grad[(None,) * missing]
        grads: dict[int, Tensor] = {}
        if needs[first]:
            shape = (*[1] * missing, *shapes[first])
            grads[first] = _times(of_first(grad, b, shape, **call).reshape(shapes[first]), self.factors[0])
        if needs[second]:
            grads[second] = _times(of_second(grad, a[(None,) * missing], shapes[second], **call), self.factors[0])
        if self.bias is not None and self.bias < len(needs) and needs[self.bias]:
            shape = shapes[self.bias]
            total = grad.sum_to_size((*shape, *[1] * (-1 - self.channel)))
            grads[self.bias] = _times(total.reshape(shape), self.factors[1])
        return grads


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


@dataclass(frozen=True)
class AttentionGradients(QuantizedGradients):
    """Of a fused attention without dropout, softmax(query @ key.T * scale + mask) @ value, as of its two matmuls.

    Args:
        scores: the products for the query and the transposed key.
        values: the products for the probabilities and the value.
        is_causal: True if queries see no later keys.
    """

    scores: tuple[QuantizedProduct, QuantizedProduct]
    values: tuple[QuantizedProduct, QuantizedProduct]
    is_causal: bool

    def saved(self, needs: Sequence[bool], args: Sequence[Any], sources: Sequence[Tensor]) -> list[Tensor | None]:
        return [*args[:2], *sources, args[3] if len(args) > 3 else None]

    def backward(
        self, grad: Tensor, saved: Sequence[Any], shapes: Sequence[Any], needs: Sequence[bool]
    ) -> dict[int, Tensor]:
        (query, key, q, k, v, mask), call = saved, dict(self.keywords)
        repeats = query.shape[-3] // key.shape[-3] if call.get("enable_gqa") else 1
        scale = query.shape[-1] ** -0.5 if call.get("scale") is None else call["scale"]
        key, k, v = (_repeated(x, repeats) for x in (key, k, v))
        scores = (query.to(grad.dtype) @ key.to(grad.dtype).mT).float() * scale  # (..., Q, K)
        p = aten._safe_softmax.default(self._masked(scores, mask), -1)
        of_p = self.values[0](grad, v, p.shape).float()
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True))
        scaled = (of_scores * scale).to(grad.dtype)
        grads: dict[int, Tensor] = {}
        if needs[0]:
            grads[0] = self.scores[0](scaled, k.mT, shapes[0])
        if needs[1]:
            grads[1] = _summed(self.scores[1](scaled, q, k.mT.shape).mT, repeats)
        if needs[2]:
            grads[2] = _summed(self.values[1](grad, p.to(grad.dtype), v.shape), repeats)
        if mask is not None and needs[3]:
            grads[3] = of_scores.sum_to_size(mask.shape)
        return grads

    def _masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if heads == 1 else x.repeat_interleave(heads, -3)


def _summed(grad: Tensor, heads: int) -> Tensor:
    return grad if heads == 1 else grad.unflatten(-3, (-1, heads)).sum(-3)


#: operator -> the positions of its factors, and of what it adds
_MATMULS = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.matmul.default: (0, 1, None),
    aten.linalg_matmul.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.baddbmm.default: (1, 2, 0),
}


def quantized_gradients(node: Node, how: GradientFormat, specs: Mapping[Node, MXSpec]) -> QuantizedGradients | None:
    """Return the gradients of a call, with quantized factors; None for a call of another operator than linear layers,
    matmuls, convolutions and attention without dropout. Makes the arguments of the call positional.

    Args:
        node: the call.
        how: the format of the gradient.
        specs: argument -> its spec in the forward pass, of those that are quantized.
    """
    make_positional(node)
    target: Any = node.target
    call: dict[str, Any] = dict(node.kwargs)
    keywords = tuple(call.items())
    if any(isinstance(value, Node) for value in call.values()):
        return None
    if target is aten.linear.default:
        pair = _pair(products.LINEAR, how, _specs_of(node, specs, 0, 1))
        return MatmulGradients(target, keywords, (0, 1), pair, bias=2, rank=2)
    if target is aten.scaled_dot_product_attention.default:
        query, key, value = _specs_of(node, specs, 0, 1, 2)
        scores = _pair(products.MATMUL, how, [query, key])
        values = _pair(products.MATMUL, how, [how.activation, value])
        return AttentionGradients(target, keywords, (0, 1, 2), scores, values, named_args(node)["is_causal"])
    if Convolution.of(node) is not None:
        return _convolution_gradients(node, how, _specs_of(node, specs, 0, 1))
    first, second, bias = _MATMULS.get(target, (0, 0, None))
    if first == second or any(len(shape_of(node.args[i]) or ()) < 2 for i in (first, second)):
        return None
    pair = _pair(products.MATMUL, how, _specs_of(node, specs, first, second))
    factors = call.get("alpha", 1), call.get("beta", 1)
    return MatmulGradients(target, keywords, (first, second), pair, bias=bias, factors=factors)


def _specs_of(node: Node, specs: Mapping[Node, MXSpec], *positions: int) -> list[MXSpec | None]:
    return [specs.get(node_arg(node, position)) for position in positions]


def _convolution_gradients(node: Node, how: GradientFormat, specs: Sequence[MXSpec | None]) -> MatmulGradients | None:
    dimensions, transposed, groups = Convolution.of(node) or (0, False, 1)
    named = named_args(node)
    kernel = value_of(named["weight"]).shape
    if any(spec is not None and spec.block_rows > 1 for spec in (how.spec, *specs)):
        return None  # nothing is before the batch that could be the rows of a block
    names = ("stride", "padding", "dilation", *["output_padding"] * transposed)
    call: dict[str, Any] = {name: _each(named[name], dimensions) for name in names if not isinstance(named[name], str)}
    if "padding" not in call:
        total = [d * (n - 1) * (named["padding"] == "same") for d, n in zip(call["dilation"], kernel[2:], strict=True)]
        if any(n % 2 for n in total):
            return None  # not the same on both sides
        call["padding"] = tuple(n // 2 for n in total)
    outputs = kernel[1] if transposed else kernel[0] // groups  # of a group: a rotation must not mix groups
    rotation = how.rotation if groups == 1 else math.gcd(how.rotation, outputs)
    kind = products.TRANSPOSED_CONVOLUTION if transposed else products.CONVOLUTION
    pair, arguments = _pair(kind, how, specs, rotation), (*call.items(), ("groups", groups))
    channel = -1 - dimensions
    return MatmulGradients(operator_of(node), (), (0, 1), pair, arguments, bias=2, rank=len(kernel), channel=channel)


def _each(values: Sequence[int], dimensions: int) -> tuple[int, ...]:
    return tuple(values) * (dimensions // len(values))


def _pair(
    pair: Products, how: GradientFormat, specs: Sequence[MXSpec | None], rotation: int | None = None
) -> tuple[QuantizedProduct, QuantizedProduct]:
    """Return the products of factors with these specs; `rotation` is that of the first, by default that of `how`."""
    (of_first, of_second), (first, second) = pair, specs
    return QuantizedProduct.of(of_first, how, second, rotation), QuantizedProduct.of(of_second, how, first)


class QuantizedBackward(TrainEvalModule):
    """An operator with quantized gradients, in both modes."""

    def __init__(self, gradients: QuantizedGradients) -> None:
        super().__init__()
        self.gradients, self.operator = gradients, gradients.operator

    def in_training(self, *args: Any, sources: Sequence[Tensor] = ()) -> Tensor:
        return self.gradients(args, sources)

    in_evaluation = in_training


def insert_quantized_gradients(model: GraphModule, quantizers: type[nn.Module]) -> None:
    """Give the operators of a graph the gradients that `GRADIENTS_KEY` in their meta notes. A module of class
    `quantizers` quantizes an operand: its argument has the float values. Changes `model`."""
    for node in list(model.graph.nodes):
        gradients = node.meta.pop(GRADIENTS_KEY, None)
        if gradients is None:
            continue
        call = node
        if node.op == "call_module":
            model.get_submodule(name_of(node)).gradients = gradients
        else:
            call = replace_by_module(node, f"{node.name}_gradients", QuantizedBackward(gradients), node.args, node.meta)
        operands = [node_arg(call, position) for position in gradients.positions]
        call.kwargs = {"sources": tuple(_source(model, operand, quantizers) for operand in operands)}
    model.recompile()


def _source(model: GraphModule, operand: Node, quantizers: type[nn.Module]) -> Node:
    is_quantized = operand.op == "call_module" and isinstance(model.get_submodule(name_of(operand)), quantizers)
    return node_arg(operand) if is_quantized else operand
