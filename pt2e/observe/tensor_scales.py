"""Tensor scales: a number that calibration finds, or the scale of a tensor, or of several that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.functional import tensor_scale_mx
from pt2mx.fx.graph.node import register_buffer
from pt2mx.kernels.float_scales import finite_amax
from pt2mx.spec import MXSpec

#: the share of a new batch in a moving average, as in torchao's observers
_AVERAGING_CONSTANT = 0.01

#: the choices for the tensor scales of activations -> the amax of (all batches so far, this batch); None: no number is
#: fixed, and each tensor has its own scale
TENSOR_SCALES: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "static": torch.maximum,
    "moving_average": lambda seen, new: seen + _AVERAGING_CONSTANT * (new - seen),
    "dynamic": None,
}


def check_tensor_scale(name: object) -> None:
    """Raise an MXError for a name that is no key of `TENSOR_SCALES`."""
    if not isinstance(name, str) or name not in TENSOR_SCALES:
        raise MXError(f"unknown tensor_scale {name!r}: {nearest(name, TENSOR_SCALES)}")


def shared_amax(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest finite magnitude of several tensors, () float32, from which their common tensor scale
    follows."""
    return torch.stack([finite_amax(tensor.detach()) for tensor in tensors]).amax()


class StaticTensorScale(nn.Module):
    """The scale of a whole tensor from the largest finite magnitude of its batches.

    A batch without a finite value, such as an empty one (an expert that gets no token), leaves the scale as it is.

    `amax` is () float32, and negative before the first finite value.

    Args:
        spec: a format with a tensor scale.
        rule: "static", the maximum over the batches, or "moving_average".
    """

    amax: Tensor

    def __init__(self, spec: MXSpec, rule: str) -> None:
        super().__init__()
        self.spec, self.rule = spec, rule
        #: True after a batch with values; a Python flag: testing `amax` would break the graph of torch.compile
        self.observed = False
        self.register_buffer("amax", torch.tensor(-1.0, dtype=torch.float32))

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Add a batch, of any shape."""
        if not x.numel():
            return
        join = TENSOR_SCALES[self.rule]
        if join is None:
            raise MXError(f"tensor_scale={self.rule!r} has a tensor scale for each call, which no batch sets")
        magnitude = x.detach().to(torch.float32).abs()
        new = torch.where(magnitude < torch.inf, magnitude, -1.0).amax()
        joined = torch.where(self.amax < 0, new, join(self.amax, new))
        self.amax.copy_(torch.where(new < 0, self.amax, joined))
        self.observed = True

    @property
    def is_known(self) -> bool:
        """True after a finite value."""
        return self.observed and bool(self.amax >= 0)

    def value(self, name: str) -> Tensor:
        """Return the scale, () float32, 1 after NaN and Inf alone; the MXError before the first batch has `name`."""
        if not self.observed:
            raise self._error(name)
        return tensor_scale_mx(self.amax.clamp(min=0), self.spec)

    def store(self, model: GraphModule, x: Node) -> Node:
        """Register the scale of `x` as a buffer of a graph, and return the node that reads it, before x; an MXError
        before the first finite value."""
        if not self.is_known:
            raise self._error(x.name)
        value = self.value(x.name)
        with model.graph.inserting_before(x):
            node = model.graph.get_attr(register_buffer(model, f"{x.name}_tensor_scale", value))
        node.meta["val"] = x.meta["val"].new_empty((), dtype=value.dtype)
        return node

    def _error(self, name: str) -> MXError:
        return MXError(
            f"the tensor scale of {name} in {self.spec} follows from calibration, and no batch was seen in which it "
            "has a finite value: run such batches through the prepared model first (of QAT in training mode), or "
            "choose tensor_scale='dynamic'"
        )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.observed = bool(self.amax >= 0)

    def extra_repr(self) -> str:
        return self.rule
