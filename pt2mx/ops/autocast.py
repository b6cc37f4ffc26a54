"""`torch.autocast` of the products with packed weights, as of `torch.nn.functional.linear`: x and bias are cast to its
dtype, which the result has too. The weight is decoded to that dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: dispatch key -> type of device
_DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastXPU": "xpu"}


def register_autocast(
    operator: torch._ops.OpOverload, computes_in: torch.dtype | None = None, of_product: int | None = None
) -> None:
    """Cast the floating arguments of a product of x: (..., K), whatever dtypes they have, under `torch.autocast`.

    Args:
        computes_in: the one dtype that the operator takes; its result is cast to that of autocast.
        of_product: how many arguments are the product's, where more is done with it, whose dtypes stay.
    """
    for key, device in _DEVICES.items():
        torch.library.impl(operator.name(), key, _kernel(operator, key, device, computes_in, of_product))


def _kernel(
    operator: torch._ops.OpOverload, key: str, device: str, computes_in: torch.dtype | None, of_product: int | None
) -> Callable[..., Tensor]:
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: object) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(without):
            cast = (_cast(a, computes_in or dtype) for a in args[:of_product])
            return operator(*cast).to(dtype) if of_product is None else operator(*cast, *args[of_product:])

    return kernel


def _cast(argument: object, dtype: torch.dtype) -> object:
    """Cast a floating tensor; float64 stays, as autocast has it. A dtype that was asked for is left to it too."""
    if isinstance(argument, torch.dtype):
        return None
    if isinstance(argument, Tensor) and argument.is_floating_point() and argument.dtype != torch.float64:
        return argument.to(dtype)
    return argument
