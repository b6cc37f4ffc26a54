"""The operators `torch.ops.pt2mx.*`: schemas, kernels, fake kernels and gradients. Design: operators.

The schemas carry plain types, so that exported programs can hold them; `pt2mx.functional` is their friendlier face.
Outputs are dense, with their dimensions in the order in memory of x's or the codes' (`pt2mx.ops.order`). Codes and
scales have the order of their values, so that the two ways to the same values (`fake_quantize_mx`, and `quantize_mx`
then `dequantize_mx`) give the next operator the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.kernels.axis import resized
from pt2mx.kernels.packing import is_packed, packed_length
from pt2mx.kernels.select import kernels_for
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.checks import check_input, check_packed, check_seed
from pt2mx.ops.order import empty_in_order, in_order
from pt2mx.ops.pair_gradient import dequantize_straight_through, no_gradient, remember_source
from pt2mx.spec import MXSpec

#: What becomes of the gradient: it passes unchanged, or is zero where the value saturated.
STRAIGHT_THROUGH = ("identity", "clipped")


def seed_of(x: Tensor, spec: MXSpec, seed: int | None) -> Tensor | None:
    """Return the seed with which x is rounded, () int64 on its device; None for a rounding that draws no numbers.

    Without a seed it is the next number of torch's default generator. It is made on the device: nothing is copied or
    waited for, and a CUDA graph draws anew at each replay.
    """
    if not ROUNDINGS[spec.rounding].random:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
    check_seed(seed)
    return torch.full((), seed, dtype=torch.int64, device=x.device)


def _quantize(
    x: Tensor,
    elem: str,
    block_size: int,
    axis: int = -1,
    scale_mode: str = "floor",
    rounding: str = "even",
    seed: int | None = None,
) -> tuple[Tensor, ...]:
    spec, x = check_input(x, elem, block_size, axis, scale_mode, rounding), torch.atleast_1d(x)
    kernels, seed_tensor = kernels_for(x, spec.element), seed_of(x, spec, seed)
    return in_order(lambda spec, x: kernels.quantize(x, spec, seed_tensor), spec, x)


def _quantize_fake(
    x: Tensor,
    elem: str,
    block_size: int,
    axis: int = -1,
    scale_mode: str = "floor",
    rounding: str = "even",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    spec, x = check_input(x, elem, block_size, axis, scale_mode, rounding), torch.atleast_1d(x)
    length, bits = x.shape[spec.axis], spec.element.bits
    scale_shape = resized(x, spec.axis, _quotient(-(-length // spec.block_size), length))
    size = packed_length(length, bits)
    data_shape = resized(x, spec.axis, _quotient(size, length) if is_packed(bits) else size)
    return empty_in_order(x, scale_shape, torch.uint8), empty_in_order(x, data_shape, torch.uint8)


def _quotient(size: int, length: int) -> int:
    """Return `size`, a quotient of the symbolic `length`, in an exported graph as a size of its own.

    Tracing asks of every size whether it is 1. Of a quotient that is a guard on `length` ("at most one block"):
    exporting with a dynamic length would fail, and torch.compile would compile twice. Of a length that the data decide
    nothing is asked, and a decomposition could not give a size of its own again.
    """
    if isinstance(length, int) or _is_decided_by_data(length):
        return size
    return torch.library.get_ctx().new_dynamic_size()


def _is_decided_by_data(length: torch.SymInt) -> bool:
    """True if `nonzero`, `item` and the like gave a length. Dynamo has a symbol with a value for `item`; later traces
    of the same graph do not."""
    from torch._dynamo.source import CallMethodItemSource  # a symbolic length means that dynamo is there

    sources = length.node.shape_env.var_to_sources
    by_item = (isinstance(s, CallMethodItemSource) for x in length.node.expr.free_symbols for s in sources.get(x, ()))
    return not length.node.has_hint() or any(by_item)


def _dequantize(data: Tensor, scale: Tensor, elem: str, block_size: int, dtype: torch.dtype, *where: Any) -> Tensor:
    spec, length = check_packed(data, scale, elem, block_size, dtype, *where)
    kernels = kernels_for(data, spec.element)
    return in_order(lambda spec, *packed: kernels.dequantize(*packed, spec, dtype, length), spec, data, scale)[0]


def _dequantize_fake(
    data: Tensor, scale: Tensor, elem: str, block_size: int, dtype: torch.dtype, *where: Any
) -> Tensor:
    spec, length = check_packed(data, scale, elem, block_size, dtype, *where)
    return empty_in_order(data, resized(data, spec.axis, length), dtype)


def _fake_quantize(
    x: Tensor,
    elem: str,
    block_size: int,
    axis: int = -1,
    scale_mode: str = "floor",
    rounding: str = "even",
    seed: int | None = None,
    ste: str = "identity",
) -> Tensor:
    spec = check_input(x, elem, block_size, axis, scale_mode, rounding)
    check_ste(ste)
    kernels, seed_tensor = kernels_for(x, spec.element), seed_of(x, spec, seed)
    (y,) = in_order(lambda spec, x: kernels.fake_quantize(x, spec, seed_tensor), spec, torch.atleast_1d(x))
    return y if x.dim() else y.as_strided_((), ())


def _fake_quantize_fake(x: Tensor, elem: str, block_size: int, *modes: Any) -> Tensor:
    check_input(x, elem, block_size, *modes[:3])
    check_ste(*modes[4:])
    return empty_in_order(x, x.shape, x.dtype)


def check_ste(ste: object = "identity") -> None:
    """Raise `MXError` for a gradient that is not one of `STRAIGHT_THROUGH`."""
    if not isinstance(ste, str) or ste not in STRAIGHT_THROUGH:
        raise MXError(f"unknown ste {ste!r}: {nearest(ste, STRAIGHT_THROUGH)}")


def _clip_gradient(grad: Tensor, x: Tensor, *modes: Any) -> Tensor:
    spec = check_input(x, *modes)
    if grad.shape != x.shape or grad.device != x.device or not grad.is_floating_point():
        raise MXError(
            f"grad of shape {tuple(grad.shape)}, {grad.dtype} on {grad.device} is no gradient of x of shape "
            f"{tuple(x.shape)} on {x.device}"
        )
    kernels, tensors = kernels_for(x, spec.element), (torch.atleast_1d(x), torch.atleast_1d(grad))
    (y,) = in_order(lambda spec, x, grad: kernels.clip_gradient(grad, x, spec), spec, *tensors)
    return y if x.dim() else y.as_strided_((), ())


def _clip_gradient_fake(grad: Tensor, x: Tensor, *modes: Any) -> Tensor:
    check_input(x, *modes)
    return empty_in_order(x, x.shape, grad.dtype)


def _save_what_clipping_needs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, *ctx.modes = inputs[:6]
    ctx.clipped = inputs[7] == "clipped"
    if ctx.clipped:
        ctx.save_for_backward(x)


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.clipped:
        (x,) = ctx.saved_tensors
        grad = torch.ops.pt2mx.clip_gradient_mx(grad, x, *ctx.modes)
    return (grad,) + (None,) * 7


def _save_values(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, x, *ctx.modes = inputs
    ctx.save_for_backward(x)


def _clip_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Clipping is linear in the gradient that it clips."""
    (x,) = ctx.saved_tensors
    return (torch.ops.pt2mx.clip_gradient_mx(grad, x, *ctx.modes),) + (None,) * 6


def _random_bits(seed: Tensor, size: list[int]) -> Tensor:
    if seed.dtype != torch.int64 or seed.dim():
        raise MXError(f"the seed tensor must be of shape () and int64, not {tuple(seed.shape)} and {seed.dtype}")
    return kernels_for(seed).random_bits(seed, torch.Size(size))


def _random_bits_fake(seed: Tensor, size: list[int]) -> Tensor:
    return seed.new_empty(size, dtype=torch.int32)


_MODES = 'str elem_dtype_name, int block_size, int axis=-1, str scale_mode="floor", str rounding="even"'


class _Operator(NamedTuple):
    """An operator to register: its kernel serves every device; `gradient` is its backward with the setup_context."""

    schema: str
    kernel: Callable[..., object]
    fake_kernel: Callable[..., object]
    gradient: tuple[Callable[..., object], Callable[..., None]] | None


_OPERATORS = {
    "quantize_mx": _Operator(
        f"(Tensor data_hp, {_MODES}, SymInt? seed=None) -> (Tensor scale, Tensor data)",
        _quantize,
        _quantize_fake,
        (no_gradient, remember_source),
    ),
    "dequantize_mx": _Operator(
        "(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, int block_size, ScalarType target_dtype, "
        "int block_dim=-1, SymInt? length=None) -> Tensor",
        _dequantize,
        _dequantize_fake,
        None,
    ),
    "fake_quantize_mx": _Operator(
        f'(Tensor x, {_MODES}, SymInt? seed=None, str ste="identity") -> Tensor',
        _fake_quantize,
        _fake_quantize_fake,
        (_straight_through, _save_what_clipping_needs),
    ),
    # the gradient of a clipped fake_quantize_mx
    "clip_gradient_mx": _Operator(
        f"(Tensor grad, Tensor x, {_MODES}) -> Tensor",
        _clip_gradient,
        _clip_gradient_fake,
        (_clip_again, _save_values),
    ),
    # the numbers of stochastic rounding
    "random_bits": _Operator(
        "(Tensor seed, SymInt[] size) -> Tensor",
        _random_bits,
        _random_bits_fake,
        None,
    ),
}

for _name, _operator in _OPERATORS.items():
    _qualified = f"pt2mx::{_name}"
    torch.library.define(_qualified, _operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_qualified, "CompositeExplicitAutograd", _operator.kernel)
    torch.library.register_fake(_qualified, _operator.fake_kernel)
    if _operator.gradient is not None:
        _backward, _setup = _operator.gradient
        torch.library.register_autograd(_qualified, _backward, setup_context=_setup)

torch.library.impl("pt2mx::dequantize_mx", "Autograd", dequantize_straight_through)

quantize_mx = torch.ops.pt2mx.quantize_mx.default
dequantize_mx = torch.ops.pt2mx.dequantize_mx.default
fake_quantize_mx = torch.ops.pt2mx.fake_quantize_mx.default
clip_gradient_mx = torch.ops.pt2mx.clip_gradient_mx.default
random_bits = torch.ops.pt2mx.random_bits.default
