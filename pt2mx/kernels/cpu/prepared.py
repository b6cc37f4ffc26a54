"""Calls of the C++ kernels by compiled code, whose shapes, dtypes and formats are known when it is compiled.

What `torch.ops.pt2mx.*` checks and looks up at each call takes longer than the matmul of a small layer. Inductor's code
makes each object once (`pt2mx.kernels.inductor.prepared`), for all of its calls of one kind. It calls an object with
contiguous tensors of the shapes and dtypes that the object was made for, and with the tensor for the result. Several
threads may call an object at the same time. Where the machine has no kernel, the object calls the operator.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pt2mx.kernels.cpu import activations, attention, linear
from pt2mx.kernels.cpu.build import is_available, load
from pt2mx.kernels.cpu.calls import ActivationCall, AttentionCall, LinearCall
from pt2mx.spec import MXSpec

__all__ = ["PreparedActivation", "PreparedAttention", "PreparedLinear"]

Shape = tuple[int, ...]


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
        #: a number of threads, and the call that divides the result among them
        self._call = torch.get_num_threads(), self._call_for()

    def _call_for(self) -> LinearCall:
        call = linear.call_of(*self._tensors, self._spec, self._isa)
        call.rotation = self._options[2]
        return call

    def __call__(self, x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
        """Multiply x by a weight."""
        if self.is_supported:
            threads, call = self._call
            if threads != torch.get_num_threads():
                threads, call = self._call = torch.get_num_threads(), self._call_for()
            library, parallel_for = load()
            operands = x.data_ptr(), data.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr()
            error = library.pt2mx_linear_of(ctypes.addressof(call), *operands, out.data_ptr(), parallel_for)
            if linear.is_computed(error):
                return
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
        self._call = None
        if self.is_supported:
            spec = MXSpec(element, block_size, -1, scale_mode, rounding)
            number = activations.ACTIVATIONS.index(activation)
            self._call = activations.call_of(_meta(x, x_dtype), _meta(x, dtype), spec, activation=number)

    def __call__(self, x: Tensor, *, out: Tensor) -> None:
        """Quantize the activation of x."""
        if self._call is None:
            out.copy_(torch.ops.pt2mx.activation_fake_quantize_mx(x, *self._options))
            return
        call = ActivationCall.from_buffer_copy(self._call)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        activations.run(call)


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
        self._call = None
        if value_width and is_available():
            keys = _meta(key, torch.uint8), _meta(key_scale, torch.uint8)
            values = _meta(value, torch.uint8), _meta(value_scale, torch.uint8)
            masks = None if mask is None else _meta(mask, torch.bool)
            spec = MXSpec(element, block_size)
            self._call = attention.call_of(_meta(query, dtype), keys, values, spec, value_width, masks, scale)
        self.is_supported = self._call is not None

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
        tensors = query, key, key_scale, value, value_scale
        if self._call is not None:
            call = AttentionCall.from_buffer_copy(self._call)
            call.query, call.out = query.data_ptr(), out.data_ptr()
            call.mask = None if mask is None else mask.data_ptr()
            call.key, call.key_scale, call.value, call.value_scale = (tensor.data_ptr() for tensor in tensors[1:])
            if attention.is_computed(call):
                return
        out.copy_(torch.ops.pt2mx.attention_mx(*tensors, *self._options, mask, self._scale))


def _meta(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
