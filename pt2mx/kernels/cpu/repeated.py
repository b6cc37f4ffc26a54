"""Calls that repeat an earlier one.

What an operator checks, and what its kernel looks up, takes longer than a small kernel. A kernel therefore keeps how it
ran a call (`keep`). The operator's next call with tensors of the same shapes, strides and dtypes, and all else equal,
passes the same checks and runs in the same way, on other pointers (`run_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _functorch

if TYPE_CHECKING:
    from pt2mx.ops.operator import Operator


_Signature = tuple[Hashable, ...]
#: operator -> signature of its arguments -> what runs a call with such arguments
_calls: dict[str, dict[_Signature, Callable[..., Any]]] = {}
#: the most calls that are kept of an operator
_MOST = 1024


def keep(call: Operator[Any], run: Callable[..., Any]) -> None:
    """Keep what runs the calls that repeat this one.

    Args:
        call: it passed its checks. What `run` does may not depend on values of its tensors.
        run: takes the arguments of the schema, without trailing ones that are None; it returns NotImplemented for
            tensors whose values the kernel does not support. Several threads may call it at the same time.
    """
    signature = _signature(call.args)
    if signature is None:
        return
    calls = _calls.setdefault(call.name, {})
    if len(calls) >= _MOST:
        calls.clear()
    calls[signature] = run


def run_again(operator: str, args: tuple[Any, ...]) -> Any:
    """Return the result of a call that repeats an earlier one; NotImplemented for others."""
    calls = _calls.get(operator)
    if not calls or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return NotImplemented
    signature = _signature(args)
    run = None if signature is None else calls.get(signature)
    return NotImplemented if run is None else run(*args)


def forget() -> None:
    """Forget all calls: tests replace what kernels look up."""
    _calls.clear()


def _signature(args: tuple[Any, ...]) -> _Signature | None:
    """Return what two calls have in common that need the same checks; None for tensors that are no plain ones of the
    CPU."""
    if _functorch.maybe_current_level() is not None:
        return None
    signature: list[Hashable] = [torch.get_num_threads()]  # kernels divide a result among them
    for arg in args:
        if type(arg) is Tensor or type(arg) is torch.nn.Parameter:
            if not arg.is_cpu or arg.layout is not torch.strided:
                return None
            signature += (arg.shape, arg.stride(), arg.dtype)
        elif isinstance(arg, Tensor):
            return None
        else:
            signature.append(arg)
    while signature[-1] is None:
        signature.pop()
    return tuple(signature)
