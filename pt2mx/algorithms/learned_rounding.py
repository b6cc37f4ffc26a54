"""Learn the rounding of a weight by signed gradient descent on latent values, which are rounded to nearest.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs"
(arXiv:2309.05516). The paper starts from rounding to nearest; here a weight may also start from given codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pt2mx.algorithms.scales import LIMIT
from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx, quantize_mx
from pt2mx.kernels import elements, reference
from pt2mx.spec import MXSpec

#: bisection steps between a value of the format and the edge of its cell
_HALVINGS = 12
#: where latent values start, as a share of the way from the rounded value to the weight or to the edge of its cell. At
#: the edge (1.0) start many values that GPTQ rounded away from the weight, and the first steps change their codes by
#: chance: MiniLM with FP4 activations then gains nothing on held-out text.
_WAY = 0.8


class LatentWeight:
    """A weight whose rounding is learned; the scales of its blocks do not change.

    Args:
        weight: (..., n, ...) float, the weight before rounding.
        rounded: values of the format in that shape, from which learning starts; None rounds to nearest.
        spec: the format, with the axis of the weight.
        scale: the scale of each value, in the weight's shape; None: powers of two, which follow from `rounded`.

    Raises:
        MXError: for different shapes, stochastic rounding, and values that the format does not have.
    """

    def __init__(self, weight: Tensor, rounded: Tensor | None, spec: MXSpec, scale: Tensor | None = None) -> None:
        if spec.rounding == "stochastic":
            raise MXError("learned rounding rounds to nearest: give a spec without stochastic rounding")
        if spec.element.values:
            raise MXError(f"learned rounding moves values by steps of a number, and {spec.element} is a codebook")
        if rounded is None:
            rounded = fake_quantize_mx(weight.detach().float(), spec)
        if weight.shape != rounded.shape:
            raise MXError(f"the weight is {tuple(weight.shape)}, and rounded {tuple(rounded.shape)}: give one shape")
        rounded = rounded.detach().float()
        self.spec = spec
        self._scale = scales_of(rounded, spec) if scale is None else scale
        if not torch.equal(self._round(rounded), rounded):
            raise MXError(f"the rounded weight holds values that {spec} does not: quantize it first")
        edge = within_cells(weight.detach().float(), rounded, self._round)
        self.latent = rounded + _WAY * (edge - rounded)
        magnitude = (rounded / self._scale).abs().clamp(min=2.0**spec.element.emin)
        exponent = torch.frexp(magnitude).exponent - 1
        self._step = torch.ldexp(self._scale, exponent - spec.element.mantissa_bits)

    def values(self) -> Tensor:
        """Return the values of the format, float32.

        Quantizing them again with any scale mode but "ceil" does not change them, if scales are powers of two. The one
        exception is FP8 E4M3: 240 times a scale, if that is the largest magnitude of its block.
        """
        return self._round(self.latent)

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Move each latent value against the sign of its gradient, the gradient with respect to `values()`, by `rate`
        distances between adjacent values of the format."""
        self.latent.addcmul_(self._step, gradient.sign().float(), value=-rate)

    def _round(self, x: Tensor) -> Tensor:
        return elements.round_to_element(x / self._scale, self.spec.element, self.spec.rounding) * self._scale


def within_cells(weight: Tensor, rounded: Tensor, round_to: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the points nearest to `weight`, on the line from `rounded` to it, that `round_to` rounds to `rounded`.

    `weight` and `rounded` are float32 of one shape; `round_to` rounds to nearest, and does not change `rounded`.
    """
    whole = round_to(weight) == rounded
    inside, way = torch.where(whole, weight, rounded), torch.where(whole, 0.0, weight - rounded)
    for _ in range(_HALVINGS):
        way = way / 2
        inside = torch.where(round_to(inside + way) == rounded, inside + way, inside)
    return inside


def scales_of(rounded: Tensor, spec: MXSpec) -> Tensor:
    """Return the block scale of each value, (..., n, ...) float32 powers of two."""
    scale, _ = quantize_mx(rounded, spec)
    powers = elements.pow2((scale.int() - elements.BIAS).clamp(-LIMIT, LIMIT))
    return reference.of_each_value(powers, spec.axis, spec.block_size, rounded.shape[spec.axis])
