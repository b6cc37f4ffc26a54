"""Gradients of the operators: what their classes compute in `backward`, registered with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from pt2mx.errors import MXError
from pt2mx.kernels.cpu.repeated import run_again


def register_gradient(cls: Any, differentiable_once: bool) -> None:
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
