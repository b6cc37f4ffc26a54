"""Calls of the C++ kernels by compiled code, whose shapes, dtypes and formats are known when it is compiled.

What `torch.ops.pt2mx.*` checks and looks up at each call takes longer than the matmul of a small layer. Inductor's code
makes each object once (`pt2mx.kernels.inductor.prepared`), for all of its calls of one kind. It calls an object with
contiguous tensors of the shapes and dtypes that the object was made for, and with the tensor for the result. Several
threads may call an object at the same time. Where the machine has no kernel, the object calls the operator.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from pt2mx.kernels.cpu import activations, attention, linear
from pt2mx.kernels.cpu.build import is_available, load
from pt2mx.spec import MXSpec

Shape = tuple[int, ...]


class Kernel:
    """A function of the library for calls of one kind.

    Args:
        name: the function. Its arguments are the call, numbers, and what runs work on threads.
        call: the structure; the function takes the pointers to tensors from the numbers.
    """

    def __init__(self, name: str, call: ctypes.Structure) -> None:
        library, parallel_for = load()
        self.function, self._call = getattr(library, name), ctypes.pointer(call)
        self._on_threads = parallel_for.value

    def __call__(self, *numbers: int) -> int:
        """Run the kernel; return 0, or an error."""
        return self.function(self._call, *numbers, self._on_threads)

    @property
    def address(self) -> int:
        """The address of the function."""
        return address_of(self.function)

    def arguments(self, *numbers: int) -> tuple[int, ...]:
        """Return all arguments of the function as numbers."""
        return ctypes.addressof(self._call.contents), *numbers, self._on_threads or 0


def address_of(function: Any) -> int:
    """Return the address of a function of a library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # ctypes has None for the address 0


class PreparedCall:
    """A call of an operator by compiled code."""

    most_tensors: ClassVar[int]
    #: True where the C++ kernels take the call
    is_supported: bool
    _kernel: Kernel | None

    def kernel(self) -> Kernel | None:
        """Return the kernel; None where there is none."""
        return self._kernel

    def numbers(self, tensors: tuple[Tensor | None, ...], out: Tensor) -> list[int]:
        """Return the numbers that the kernel takes for a call: pointers, 0 for each tensor that is missing."""
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return [*pointers, *[0] * (self.most_tensors - len(pointers)), out.data_ptr()]

    def call_operator(self, *tensors: Tensor | None) -> Tensor:
        """Return the result of the operator."""
        raise NotImplementedError

    def __call__(self, *tensors: Tensor | None, out: Tensor) -> None:
        """Compute the result."""
        kernel = self.kernel()
        if kernel is None or kernel(*self.numbers(tensors, out)):
            out.copy_(self.call_operator(*tensors))


class PreparedLinear(PreparedCall):
    """`linear_mx` of a few rows: (x, data, scale, bias or None).

    Args:
        x, data, scale: the shapes of x, of the weight's codes and of its scales.
        x_dtype, dtype: the dtypes of x and of the result.
        element, block_size, rotation: as of `linear_mx`.
    """

    most_tensors = 4

    def __init__(
        self,
        x: Shape,
        data: Shape,
        scale: Shape,
        x_dtype: torch.dtype,
        dtype: torch.dtype,
        element: str,
        block_size: int,
        rotation: int,
    ) -> None:
        self._options = element, block_size, rotation, dtype
        self._spec, self._out = MXSpec(element, block_size), _meta((*x[:-1], data[0]), dtype)
        self._tensors = _meta(x, x_dtype), _meta(data, torch.uint8), _meta(scale, torch.uint8), None, self._out
        rows = self._out.shape[:-1].numel()
        most = linear.VECTOR_ROWS if rotation else linear.FEW_ROWS
        self.is_supported = 0 < rows <= most and 0 not in (x[-1], data[0]) and is_available()
        self._isa = linear.matrix_isa_for(self._spec, rows, x[-1], x_dtype) if self.is_supported else 0
        #: a number of threads, and the kernel that divides the result among them
        self._kernel_of = torch.get_num_threads(), self._make_kernel()

    def _make_kernel(self) -> Kernel | None:
        if not self.is_supported:
            return None
        call = linear.call_of(*self._tensors, self._spec, self._isa)
        call.rotation = self._options[2]
        return Kernel("pt2mx_linear_of", call)

    def kernel(self) -> Kernel | None:
        threads, kernel = self._kernel_of
        if threads != torch.get_num_threads():
            threads, kernel = self._kernel_of = torch.get_num_threads(), self._make_kernel()
        return kernel

    def call_operator(self, *tensors: Tensor | None) -> Tensor:
        x, data, scale, bias = (*tensors, None)[: self.most_tensors]
        return torch.ops.pt2mx.linear_mx(x, data, scale, bias, *self._options)


class PreparedActivation(PreparedCall):
    """`activation_fake_quantize_mx`: (x,).

    Args:
        x: the shape of x.
        x_dtype, dtype: the dtypes of x and of the result.
        activation, element, block_size, scale_mode, rounding: as of the operator.
    """

    most_tensors = 1

    def __init__(
        self,
        x: Shape,
        x_dtype: torch.dtype,
        dtype: torch.dtype,
        activation: str,
        element: str,
        block_size: int,
        scale_mode: str,
        rounding: str,
    ) -> None:
        self._options = activation, element, block_size, scale_mode, rounding, dtype
        self.is_supported = 0 not in x and is_available()
        self._kernel = None
        if self.is_supported:
            spec = MXSpec(element, block_size, -1, scale_mode, rounding)
            number = activations.ACTIVATIONS.index(activation)
            call = activations.call_of(_meta(x, x_dtype), _meta(x, dtype), spec, activation=number)
            self._kernel = Kernel("pt2mx_quantize_activation_of", call)

    def call_operator(self, *tensors: Tensor | None) -> Tensor:
        return torch.ops.pt2mx.activation_fake_quantize_mx(*tensors, *self._options)


class _PreparedAttention(PreparedCall):
    """Attention of a few queries over a cache, whose slots the tensors of a call tell. The mask is the last tensor."""

    def numbers(self, tensors: tuple[Tensor | None, ...], out: Tensor) -> list[int]:
        return [self._slots(tensors)[0], *super().numbers(tensors, out)]

    def _slots(self, tensors: tuple[Tensor | None, ...]) -> list[int]:
        """Return the slots of each tensor of the cache."""
        return [tensor.shape[2] for tensor in tensors[1 : self.most_tensors - 1] if tensor is not None]

    def __call__(self, *tensors: Tensor | None, out: Tensor) -> None:
        slots, last = set(self._slots(tensors)), self.most_tensors - 1
        mask = tensors[last] if len(tensors) > last else None
        if len(slots) > 1 or (mask is not None and mask.shape[3] not in slots):
            out.copy_(self.call_operator(*tensors))  # it raises an error
        else:
            super().__call__(*tensors, out=out)


class PreparedAttention(_PreparedAttention):
    """`attention_mx` with E8M0 scales: (query, key, key_scale, value, value_scale, mask or None).

    Args:
        query, key, key_scale, value, value_scale, mask: the shapes of the tensors with one slot; None without a mask.
        dtype: the dtype of the query.
        element, block_size, value_width, scale: as of `attention_mx`.
    """

    most_tensors = 6

    def __init__(
        self,
        query: Shape,
        key: Shape,
        key_scale: Shape,
        value: Shape,
        value_scale: Shape,
        mask: Shape | None,
        dtype: torch.dtype,
        element: str,
        block_size: int,
        value_width: int,
        scale: float | None,
    ) -> None:
        self._options, self._scale = (element, block_size, value_width), scale
        call = None
        if value_width and is_available():
            keys = _meta(key, torch.uint8), _meta(key_scale, torch.uint8)
            values = _meta(value, torch.uint8), _meta(value_scale, torch.uint8)
            spec = MXSpec(element, block_size)
            call = attention.call_of(_meta(query, dtype), keys, values, spec, value_width, _mask(mask), scale)
        self._kernel = None if call is None else Kernel("pt2mx_attention_of", call)
        self.is_supported = call is not None

    def call_operator(self, *tensors: Tensor | None) -> Tensor:
        mask = tensors[5] if len(tensors) == self.most_tensors else None
        return torch.ops.pt2mx.attention_mx(*tensors[:5], *self._options, mask, self._scale)


class PreparedDecodingAttention(_PreparedAttention):
    """`decoding_attention`: (query, keys, values, mask or None).

    Args:
        query, keys, values, mask: the shapes of the tensors with one slot; None without a mask.
        dtype: the dtype of the query, the keys and the values.
        scale: as of `decoding_attention`.
    """

    most_tensors = 4

    def __init__(
        self, query: Shape, keys: Shape, values: Shape, mask: Shape | None, dtype: torch.dtype, scale: float | None
    ) -> None:
        self._scale = scale
        call = None
        if is_available():
            tensors = _meta(query, dtype), _meta(keys, dtype), _meta(values, dtype)
            call = attention.dense_call_of(*tensors, _mask(mask), scale)
        self._kernel = None if call is None else Kernel("pt2mx_decoding_attention_of", call)
        self.is_supported = call is not None

    def call_operator(self, *tensors: Tensor | None) -> Tensor:
        query, keys, values, mask = (*tensors, None)[: self.most_tensors]
        return torch.ops.pt2mx.decoding_attention(query, keys, values, mask, self._scale, None)


def _mask(shape: Shape | None) -> Tensor | None:
    return None if shape is None else _meta(shape, torch.bool)


def _meta(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
