"""Record the kernels that a compiled program calls on the CPU, so that a replay calls them without Python.

Inductor's code for the CPU is a Python function. It allocates tensors and calls hundreds of kernels, which takes longer
than the kernels of one token of a small decoder. A program whose tensors keep their addresses runs that code once:
`record` runs it with other objects in place of kernels, operators and `empty_strided_cpu`. They do the same, note the
addresses of kernels and tensors, and keep the tensors. The code may use no other names, so nothing goes unnoticed.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
from collections.abc import Callable
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph
from torch._ops import OpOverloadPacket, _OpNamespace

from pt2mx.kernels.cpu.calls import MOST_ARGUMENTS
from pt2mx.kernels.cpu.prepared import PreparedCall, address_of
from pt2mx.kernels.cpu.replay import Call, OperatorCall, Replay, tensors_of
from pt2mx.patches.compiled_graphs import intercepted_graphs

#: names of generated code that compute nothing
_HARMLESS = "reinterpret_tensor", "assert_size_stride", "assert_alignment", "device", "inf", "nan"


def record(program: Callable[[], Tensor]) -> tuple[Tensor, Replay | None]:
    """Call a program that `torch.compile` made, and record its kernels.

    Args:
        program: returns one new tensor. Its inputs must be the same tensors for the replay, and it must give the same
            when it runs twice.

    Returns:
        The tensor, and what computes it again, in the same memory. None for a program that reads values of tensors in
        Python, and for one of several graphs.
    """
    recorder = _Recorder()
    with intercepted_graphs(recorder.run):
        result = program()
    return result, recorder.replay_of(result)


class RecordedProgram:
    """A program that records its kernels when it runs, and then replays them. It records them again where a replay does
    not compute the result.

    Args:
        program: as of `record`.
    """

    def __init__(self, program: Callable[[], Tensor]) -> None:
        self._program, self._records = program, True
        self._recorded: tuple[Tensor, Replay] | None = None

    @property
    def is_recorded(self) -> bool:
        """True where the next call replays the kernels."""
        return self._recorded is not None

    def __call__(self) -> Tensor:
        """Return the program's result, which the next call overwrites."""
        if self._recorded is not None:
            result, replay = self._recorded
            may_write = torch.is_inference_mode_enabled() or not result.is_inference()
            if may_write and replay():
                return result
        if not self._records:
            return self._program()
        result, new = record(self._program)
        self._records, self._recorded = new is not None, None if new is None else (result, new)
        return result


class _Unrecordable(Exception):
    """The generated code does what a replay cannot do."""


class _Recorder:
    """The kernels that generated code has called, and the tensors that it has made."""

    def __init__(self) -> None:
        self._calls: list[Call | OperatorCall] = []
        self._inputs: list[Tensor] = []
        self._kept: list[Any] = []
        self._outputs: list[Tensor] | None = None
        self._fails = False

    def run(self, graph: CompiledFxGraph, inputs: list[Any], otherwise: Callable[[], Any]) -> Any:
        """Run the code of a graph and record it, or run it otherwise."""
        code: Any = graph.current_callable
        if self._fails or self._outputs is not None or not _is_generated(code):
            self._fails = True
            return otherwise()
        self._inputs = [one for one in inputs if isinstance(one, Tensor)]
        try:
            recorded = FunctionType(code.__func__.__code__, self._names(code.__func__.__globals__))
            outputs = recorded(code.__self__, list(inputs))
        except _Unrecordable:
            self._fails = True
            return otherwise()
        self._outputs = list(outputs)
        inputs.clear()
        return outputs

    def replay_of(self, result: Tensor) -> Replay | None:
        """Return the replay; None for code that was not recorded or that gives other tensors than the result."""
        outputs = [] if self._fails or self._outputs is None else self._outputs
        if len(outputs) != 1 or _memory(outputs[0]) != _memory(result):
            return None
        return Replay(self._calls, [*self._kept, outputs], self._inputs)

    def _names(self, names: dict[str, Any]) -> dict[str, Any]:
        """Return the names that the code may use."""
        kinds = torch.dtype, torch.layout, torch.memory_format
        constants = {name: one for name, one in vars(torch).items() if isinstance(one, kinds)}
        operators = _Operators(torch.ops, self._operator)
        used: dict[str, Any] = {
            "torch": _Torch(**constants, ops=operators),
            "aten": operators.aten,
            "empty_strided_cpu": self._empty,
        }
        if "extern_kernels" in names:
            used["extern_kernels"] = _Operators(names["extern_kernels"], self._operator)
        used |= {name: names[name] for name in _HARMLESS if name in names}
        for name, value in names.items():
            if isinstance(value, PreparedCall):
                used[name] = self._prepared(value)
            elif isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel":
                used[name] = self._kernel(value)
            elif isinstance(value, Tensor):
                used[name] = value
                self._kept.append(value)
        return _Names(used)

    def _empty(self, *args: Any) -> Tensor:
        tensor: Tensor = torch._C._dynamo.guards._empty_strided_cpu(*args)  # type: ignore[attr-defined]
        self._kept.append(tensor)
        return tensor

    def _operator(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = operator(*args, **kwargs)
            self._calls.append(OperatorCall(operator, args, kwargs, tensors_of(result)))
            return result

        return run

    def _prepared(self, prepared: PreparedCall) -> Callable[..., None]:
        def run(*tensors: Tensor | None, out: Tensor) -> None:
            kernel = prepared.kernel()
            if kernel is None:
                raise _Unrecordable
            prepared(*tensors, out=out)
            arguments = kernel.arguments(*prepared.numbers(tensors, out))
            self._calls.append(Call(kernel.address, True, arguments, kernel))

        return run

    def _kernel(self, function: BuiltinFunctionType) -> Callable[..., None]:
        library = ctypes.CDLL(function.__self__.__file__)  # type: ignore[attr-defined]  # its module
        address = address_of(library.kernel)

        def run(*args: Tensor | int) -> None:
            if len(args) > MOST_ARGUMENTS or not all(isinstance(arg, (Tensor, int)) for arg in args):
                raise _Unrecordable
            function(*args)
            numbers = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            self._calls.append(Call(address, False, numbers, library))

        return run


class _Names(dict[str, Any]):
    """The names that the code may use, besides Python's own."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(name) if hasattr(builtins, name) else _Unrecordable(name)


class _Torch(SimpleNamespace):
    """The names of torch that the code may use."""

    def __getattr__(self, name: str) -> Any:
        raise _Unrecordable(name)


class _Operators:
    """A namespace of operators, with `record` of each in its place."""

    def __init__(self, names: Any, record: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._names, self._record = names, record

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._names, name)
        is_namespace = isinstance(value, (_OpNamespace, OpOverloadPacket))
        return _Operators(value, self._record) if is_namespace else self._record(value)


def _is_generated(code: Any) -> bool:
    """Return whether Inductor generated the code of a graph, and nothing wraps it; False for code that reads tensors in
    Python, by their attributes or in a condition."""
    if not isinstance(code, MethodType) or code.__func__.__name__ != "call":
        return False
    instructions = list(dis.get_instructions(code.__func__))
    read = {
        one.argval
        for before, one in pairwise(instructions)
        if before.opname.startswith("LOAD_FAST") and one.opname in ("LOAD_ATTR", "LOAD_METHOD")
    }
    jumps = any(one.is_jump_target for one in instructions)
    return not jumps and read <= {"clear"}  # of the list of inputs


def _memory(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
