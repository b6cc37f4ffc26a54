"""Batch norm in quantization-aware training: fold it into the weight before quantization, and keep updating its
statistics.

Following Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference"
(2018), section 3.2, and Krishnamoorthi (2018), section 3.1.2: the converted model holds the weight w * gamma / sqrt(var
+ eps), with the running variance. Training quantizes the same weight, with the running variance from the start of the
training step. It divides the layer's output by the same factor before the batch norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.convolution import LAYERS, Convolution, normalizes_outputs
from pt2mx.fx.graph.node import args_of, called_module, make_positional, name_of, node_arg, operator_of
from pt2mx.fx.graph.tensors import delete_unused_modules
from pt2mx.fx.training.train_eval import (
    TrainEvalModule,
    in_backward_pass,
    insert_module,
    replace_by_module,
    train_eval_modules,
)

aten = torch.ops.aten


class ScaledWeight(TrainEvalModule):
    """weight, gamma (channels) or None, running variance (channels) -> the weight with the batch norm folded in.

    In training a channel whose gamma is zero keeps its weight unscaled: scaled to zero, it could not learn again.

    Args:
        step: shared with the `NormalizedLayer` that gets the weight.
        rank: the number of dimensions of the weight.
        eps: the batch norm's.
        transposed, groups: the convolution's.
    """

    def __init__(self, step: StepVariance, rank: int, eps: float, transposed: bool, groups: int) -> None:
        super().__init__()
        self.step = step
        self.rank, self.eps, self.transposed, self.groups = rank, eps, transposed, groups

    def in_training(self, weight: Tensor, gamma: Tensor | None, variance: Tensor) -> Tensor:
        return self._scaled(weight, ones_for_zeros(scale_of(gamma, self.step(variance), self.eps)))

    def in_evaluation(self, weight: Tensor, gamma: Tensor | None, variance: Tensor) -> Tensor:
        return self._scaled(weight, scale_of(gamma, variance, self.eps))

    def _scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        ones = [1] * (self.rank - 2)
        if not self.transposed:
            return aten.mul.Tensor(weight, aten.reshape.default(scale, [-1, 1, *ones]))
        # (in, out / groups, ...): the inputs of a group affect only its outputs
        parts = aten.reshape.default(scale, [self.groups, 1, -1, *ones])
        grouped = aten.unflatten.int(weight, 0, [self.groups, -1])
        return aten.flatten.using_ints(aten.mul.Tensor(grouped, parts), 0, 1)


class NormalizedLayer(TrainEvalModule):
    """A layer with a weight from `ScaledWeight`, and the batch norm after it: (x, weight, bias, gamma, beta, mean,
    variance) -> normalized outputs. In evaluation it is the layer alone, with the batch norm folded into its bias.

    Args:
        step: shared with the `ScaledWeight` that gives the weight.
        operator: the layer, one of `LAYERS`.
        layer_args: its arguments after the bias.
        rank: the number of dimensions of its outputs.
        norm: momentum, eps and cudnn_enabled of the batch norm.
    """

    operator: OpOverload
    #: (arguments, operands before they were quantized) -> the layer's outputs with quantized gradients, if it has such
    gradients: Callable[[tuple[Any, ...], Sequence[Tensor]], Tensor] | None = None

    def __init__(
        self,
        step: StepVariance,
        operator: OpOverload,
        layer_args: tuple[Any, ...],
        rank: int,
        norm: tuple[float, float, bool],
    ) -> None:
        super().__init__()
        self.step = step
        self.operator, self.layer_args, self.rank = operator, layer_args, rank
        self.momentum, self.eps, self.cudnn = norm
        #: what gets the layer's result and its tensors, and returns the sums of a register of limited precision
        self.accumulator: nn.Module | None = None

    def in_training(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        sources: Sequence[Tensor] = (),
    ) -> Tensor:
        shape = [1, -1, *[1] * (self.rank - 2)]
        scale = ones_for_zeros(scale_of(gamma, self.step(variance), self.eps))
        y = self._layer((x, weight, None, *self.layer_args), sources) / scale.reshape(shape)
        y = y if bias is None else y + bias.reshape(shape)
        self.step.ends_with_gradient_of(y)
        if in_backward_pass():
            mean, variance = mean.clone(), variance.clone()  # checkpointing repeats a pass that has written them
        return aten.batch_norm.default(y, gamma, beta, mean, variance, True, self.momentum, self.eps, self.cudnn)

    def in_evaluation(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        sources: Sequence[Tensor] = (),
    ) -> Tensor:
        scale = scale_of(gamma, variance, self.eps)
        shift = aten.neg.default(mean) if bias is None else aten.sub.Tensor(bias, mean)
        shift = aten.mul.Tensor(shift, scale)
        shift = shift if beta is None else aten.add.Tensor(shift, beta)
        return self._layer((x, weight, shift, *self.layer_args), sources)

    def _layer(self, args: tuple[Any, ...], sources: Sequence[Tensor]) -> Tensor:
        y = self.operator(*args) if self.gradients is None else self.gradients(args, sources)
        return y if self.accumulator is None else self.accumulator(y, *args[:3])


def scale_of(gamma: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """Return the factor of each channel of a batch norm: gamma / sqrt(variance + eps)."""
    inverse = aten.rsqrt.default(aten.add.Scalar(variance, eps))
    return inverse if gamma is None else aten.mul.Tensor(gamma, inverse)


def ones_for_zeros(scale: Tensor) -> Tensor:
    """Return the factors with 1 for each 0, by which nothing can be divided."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def fuse_batch_norms(model: GraphModule, quantizers: type[nn.Module]) -> GraphModule:
    """Fuse every batch norm that depends on the mode and is the only user of a layer whose weight a module of class
    `quantizers` quantizes. Changes the graph of `model` and returns it."""
    norms = [norm for norm, module in train_eval_modules(model) if module.operator is aten.batch_norm.default]
    for norm in norms:
        layer = node_arg(norm)
        if _is_layer(layer) and normalizes_outputs(layer, norm):
            weight, bias = (called_module(n) if isinstance(n, Node) else None for n in (*layer.args, None)[1:3])
            # the scale of a bias that is quantized differently may depend on the weight's scale, which changes here
            if isinstance(weight, quantizers) and (bias is None or type(bias) is type(weight)):
                _fuse(model, layer, norm)
    if norms:
        model.graph.eliminate_dead_code()
        delete_unused_modules(model)
        model.recompile()
    return model


def _fuse(model: GraphModule, layer: Node, norm: Node) -> None:
    """Replace a layer and its norm by a `ScaledWeight`, a copy of the quantizer and a `NormalizedLayer`."""
    _, gamma, beta, mean, variance, _, momentum, eps, cudnn = args_of(norm)
    x, quantize, *others = args_of(layer)
    bias, layer_args = (others[0], others[1:]) if others else (None, [])
    weight = node_arg(quantize)
    convolution = Convolution.of(layer)
    transposed, groups = (False, 1) if convolution is None else (convolution.transposed, convolution.groups)
    step = StepVariance(variance.meta["val"])
    scale = ScaledWeight(step, weight.meta["val"].dim(), eps, transposed, groups)
    scaled = insert_module(norm, f"{layer.name}_weight", scale, (weight, gamma, variance), quantize.meta)
    # a copy: another layer may share the weight, but not the batch norm
    quantizer = copy.deepcopy(model.get_submodule(name_of(quantize)))
    quantized = insert_module(norm, f"{layer.name}_weight_quantized", quantizer, (scaled,), quantize.meta)
    meta = {**layer.meta, "val": norm.meta["val"]}
    # torch.compile needs plain lists; graph arguments have their own list class
    plain = tuple(list(argument) if isinstance(argument, list) else argument for argument in layer_args)
    normalized = NormalizedLayer(step, operator_of(layer), plain, meta["val"].dim(), (momentum, eps, cudnn))
    args = (x, quantized, bias, gamma, beta, mean, variance)
    replace_by_module(norm, f"{layer.name}_normalized", normalized, args, meta)


def _is_layer(node: Node) -> bool:
    if node.op != "call_function" or node.target not in LAYERS:
        return False
    make_positional(node)
    return len(node.users) == 1


class StepVariance(nn.Module):
    """Return the running variance as it was when the training step began.

    A training pass writes the running variance after it read it. If the scale of a quantized weight changed at once, a
    second pass over the same batch would see another weight. Activation checkpointing, which repeats a pass for its
    gradient, would then compute the gradient of another function. A step begins with the first pass after a backward
    pass, after one whose outputs need no gradient, and after `train()` or `eval()`. In compiled code, each pass begins
    a step, except one that a backward pass repeats.

    Args:
        like: (channels,), a tensor of the running variance's shape, dtype and device.
    """

    variance: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        variance = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        self.register_buffer("variance", variance, persistent=False)
        self._begins = True

    def forward(self, running: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.pt2mx.step_variance(running, self.variance)
        if is_fake(running) or is_functorch_wrapped_tensor(running):
            return running.clone()
        if self._begins and not in_backward_pass():
            self.variance, self._begins = running.clone(), False
        return self.variance

    def ends_with_gradient_of(self, y: Tensor) -> None:
        """End the step when the gradient of `y`, an output that the variance scaled, is computed. End it now if `y`
        needs no gradient, because the layer and those before it are frozen."""
        if torch.compiler.is_compiling():
            return
        if y.requires_grad:
            y.register_hook(self._end)
        elif torch.is_grad_enabled():  # not in the first pass of reentrant checkpointing
            self._begins = True

    def _end(self, gradient: Tensor) -> None:
        self._begins = True

    def train(self, mode: bool = True) -> StepVariance:
        """Switch the mode, and begin a new step."""
        self._begins = True
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._begins = True


# Not an operator of torch: AOTAutograd may compute those again in the backward pass, from the running variance as the
# forward pass left it.
torch.library.define(
    "pt2mx::step_variance", "(Tensor running, Tensor(a!) kept) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl("pt2mx::step_variance", "CompositeExplicitAutograd")
def _step_variance(running: Tensor, kept: Tensor) -> Tensor:
    """Return a copy of a running variance, (channels,), and keep one in `kept`; in a backward pass, return a copy of
    `kept`, which the pass that is repeated there read."""
    if not in_backward_pass():
        kept.copy_(running)
    return kept.clone()


@torch.library.register_fake("pt2mx::step_variance")
def _fake_step_variance(running: Tensor, kept: Tensor) -> Tensor:
    return running.clone()
