"""Calls of the C++ kernels by compiled code, whose shapes, dtypes and formats are known when it is compiled.

What `torch.ops.pt2mx.*` checks and looks up at each call takes longer than the matmul of a small layer. Inductor's code
makes each object once (`pt2mx.kernels.inductor.prepared`), for all of its calls of one kind. It calls an object with
contiguous tensors of the shapes and dtypes that the object was made for, and with the tensor for the result. Several
threads may call an object at the same time. Where the machine has no kernel, the object calls the operator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from pt2mx.kernels.cpu import activations, attention, linear
from pt2mx.kernels.cpu.build import is_available, load
from pt2mx.spec import MXSpec

__all__ = ["PreparedActivation", "PreparedAttention", "PreparedLinear"]

Shape = tuple[int, ...]
#: pointers to tensors -> 0, or an error
Kernel = Callable[..., int]


class PreparedLinear:
    """`linear_mx` of a few rows.

    Args:
        x, data, scale: the shapes of x, of the weight's codes and of its scales.
        x_dtype, dtype: the dtypes of x and of the result.
        element, block_size, rotation: as of `linear_mx`.
    """

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
        #: True where the C++ kernels take the call
        self.is_supported = 0 < rows <= most and 0 not in (x[-1], data[0]) and is_available()
        self._isa = linear.matrix_isa_for(self._spec, rows, x[-1], x_dtype) if self.is_supported else 0
        #: a number of threads, and the kernel that divides the result among them
        self._run = torch.get_num_threads(), self._kernel()

    def _kernel(self) -> Kernel | None:
        if not self.is_supported:
            return None
        call = linear.call_of(*self._tensors, self._spec, self._isa)
        call.rotation = self._options[2]
        return _kernel("pt2mx_linear_of", call)

    def __call__(self, x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
        """Multiply x by a weight."""
        threads, run = self._run
        if threads != torch.get_num_threads():
            threads, run = self._run = torch.get_num_threads(), self._kernel()
        of_bias = None if bias is None else bias.data_ptr()
        if run is None or run(x.data_ptr(), data.data_ptr(), scale.data_ptr(), of_bias, out.data_ptr()):
            out.copy_(torch.ops.pt2mx.linear_mx(x, data, scale, bias, *self._options))


class PreparedActivation:
    """`activation_fake_quantize_mx`.

    Args:
        x: the shape of x.
        x_dtype, dtype: the dtypes of x and of the result.
        activation, element, block_size, scale_mode, rounding: as of the operator.
    """

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
        self._run = None
        if self.is_supported:
            spec = MXSpec(element, block_size, -1, scale_mode, rounding)
            number = activations.ACTIVATIONS.index(activation)
            call = activations.call_of(_meta(x, x_dtype), _meta(x, dtype), spec, activation=number)
            self._run = _kernel("pt2mx_quantize_activation_of", call)

    def __call__(self, x: Tensor, *, out: Tensor) -> None:
        """Quantize the activation of x."""
        if self._run is None or self._run(x.data_ptr(), out.data_ptr()):
            out.copy_(torch.ops.pt2mx.activation_fake_quantize_mx(x, *self._options))


class PreparedAttention:
    """`attention_mx` of a few queries, with E8M0 scales.

    Args:
        query, key, key_scale, value, value_scale, mask: the shapes of the tensors; None without a mask.
        dtype: the dtype of the query.
        element, block_size, value_width, scale: as of `attention_mx`.
    """

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
            masks = None if mask is None else _meta(mask, torch.bool)
            spec = MXSpec(element, block_size)
            call = attention.call_of(_meta(query, dtype), keys, values, spec, value_width, masks, scale)
        self._run = None if call is None else _kernel("pt2mx_attention_of", call)
        self.is_supported = call is not None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        key_scale: Tensor,
        value: Tensor,
        value_scale: Tensor,
        mask: Tensor | None = None,
        *,
        out: Tensor,
    ) -> None:
        """Attend over codes."""
        if self._run is not None:
            keys, values = (key.data_ptr(), key_scale.data_ptr()), (value.data_ptr(), value_scale.data_ptr())
            of_mask = None if mask is None else mask.data_ptr()
            if not self._run(query.data_ptr(), *keys, *values, of_mask, out.data_ptr()):
                return
        tensors = query, key, key_scale, value, value_scale
        out.copy_(torch.ops.pt2mx.attention_mx(*tensors, *self._options, mask, self._scale))


def _kernel(name: str, call: ctypes.Structure) -> Kernel:
    """Return the function of the library for a call. Only pointers are arguments; it returns 0 where it computed."""
    library, parallel_for = load()
    function, pointer, on_threads = getattr(library, name), ctypes.pointer(call), parallel_for.value
    return lambda *pointers: function(pointer, *pointers, on_threads)


def _meta(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
