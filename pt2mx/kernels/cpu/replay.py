"""Calls of kernels with the arguments of an earlier run: many of them by one call from Python (`src/replay.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch.utils import _pytree as pytree

from pt2mx.kernels.cpu.build import load
from pt2mx.kernels.cpu.calls import MOST_ARGUMENTS, RecordedCall


class Call(NamedTuple):
    """A call of a kernel.

    Args:
        kernel: the address of a C function.
        returns_error: whether it returns an error as an int; the result is ignored otherwise.
        arguments: pointers and integers, at most `MOST_ARGUMENTS`.
        owner: keeps the kernel alive.
    """

    kernel: int
    returns_error: bool
    arguments: Sequence[int]
    owner: object


class OperatorCall(NamedTuple):
    """A call of an operator of torch.

    Args:
        operator: the operator.
        args, kwargs: its arguments.
        results: the tensors that it returned, which the results of a replay replace.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]

    def run(self) -> bool:
        """Call the operator again; return False where the results have other shapes."""
        new = tensors_of(self.operator(*self.args, **self.kwargs))
        if [one.shape for one in new] != [one.shape for one in self.results]:
            return False
        for result, one in zip(self.results, new, strict=True):
            if one.data_ptr() != result.data_ptr():  # it is not an argument
                result.copy_(one)
        return True


class Replay:
    """Kernels and operators to call in order, in the state that torch has now: its threads, autocast and gradients.

    Args:
        calls: the calls.
        kept: keeps alive what the arguments point to.
        inputs: tensors of others, who may give them other memory (`tensor.data = ...`).
    """

    def __init__(self, calls: Sequence[Call | OperatorCall], kept: object, inputs: Sequence[Tensor] = ()) -> None:
        self._kept, self._state = (calls, kept), GlobalStateGuard()
        self._inputs, self._addresses = inputs, _addresses(inputs)
        self._parts: list[Callable[[], bool]] = []
        kernels: list[Call] = []
        for call in calls:
            if isinstance(call, Call):
                kernels.append(call)
                continue
            self._parts += [*_joined(kernels), call.run]
            kernels = []
        self._parts += _joined(kernels)

    def __call__(self) -> bool:
        """Run the calls; return False where one did not compute its result, where torch is in another state, and where
        an input is in other memory. Then the results are undefined."""
        is_same = self._state.check() and self._addresses == _addresses(self._inputs)
        return is_same and all(part() for part in self._parts)


def tensors_of(result: object) -> list[Tensor]:
    """Return the tensors of a result."""
    return [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _joined(calls: Sequence[Call]) -> list[Callable[[], bool]]:
    """Return one function that runs all kernels; none without kernels."""
    if not calls:
        return []
    library, _ = load()
    run, count, structures = library.pt2mx_replay, len(calls), (RecordedCall * len(calls))()
    for structure, (kernel, returns_error, arguments, _) in zip(structures, calls, strict=True):
        numbers = [number % 2**64 for number in arguments]
        structure.kernel, structure.returns_error = kernel, returns_error
        structure.arguments = (*numbers, *[0] * (MOST_ARGUMENTS - len(numbers)))
    return [lambda: run(structures, count) == count]
