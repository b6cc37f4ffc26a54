"""Calls of the C++ kernels by compiled code, whose shapes, dtypes and formats are known when it is compiled.

What `torch.ops.pt2mx.*` checks and looks up at each call takes longer than the matmul of a small layer. Inductor's code
makes each object once (`pt2mx.kernels.inductor.prepared`), for all of its calls of one kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.kernels.cpu.build import is_available, load
from pt2mx.kernels.cpu.calls import LinearCall
from pt2mx.kernels.cpu.linear import FEW_ROWS, VECTOR_ROWS, call_of, is_computed, matrix_isa_for
from pt2mx.kernels.packing import packed_length
from pt2mx.spec import MXSpec

__all__ = ["PreparedLinear"]


class PreparedLinear:
    """`linear_mx` of a few rows, into a tensor of the caller. Several threads may call it at the same time.

    Args:
        shape: (..., K), the shape of x.
        n: the rows of the weight.
        x_dtype, dtype: the dtypes of x and of the result.
        element, block_size, rotation: as of `linear_mx`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        n: int,
        x_dtype: torch.dtype,
        dtype: torch.dtype,
        element: str,
        block_size: int,
        rotation: int,
    ) -> None:
        self._options = element, block_size, rotation, dtype
        self._spec, self._x = MXSpec(element, block_size), torch.empty(shape, dtype=x_dtype, device="meta")
        self._out = torch.empty((*shape[:-1], n), dtype=dtype, device="meta")
        self._isa = matrix_isa_for(self._spec, self._out.shape[:-1].numel(), shape[-1], x_dtype)
        #: a number of threads, and the call that divides the result among them
        self._call = torch.get_num_threads(), self._call_for()
        self._loaded = load() if is_available() else None

    @staticmethod
    def supports(rows: int, rotation: int) -> bool:
        """Return True where the C++ kernels take a call of `rows` rows."""
        return 0 < rows <= (VECTOR_ROWS if rotation else FEW_ROWS) and is_available()

    def _call_for(self) -> LinearCall:
        k, n = self._x.shape[-1], self._out.shape[-1]
        data = torch.empty(n, packed_length(k, self._spec.element.bits), dtype=torch.uint8, device="meta")
        scale = torch.empty(n, -(-k // self._spec.block_size), dtype=torch.uint8, device="meta")
        call = call_of(self._x, data, scale, None, self._out, self._spec, self._isa)
        call.rotation = self._options[2]
        return call

    def __call__(self, x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
        """Multiply x by a weight and write `out`: contiguous tensors of the shapes and dtypes that it was made for."""
        if self._loaded is not None:
            library, parallel_for = self._loaded
            threads, call = self._call
            if threads != torch.get_num_threads():
                threads, call = self._call = torch.get_num_threads(), self._call_for()
            weight, of_bias = (data.data_ptr(), scale.data_ptr()), None if bias is None else bias.data_ptr()
            pointers = x.data_ptr(), *weight, of_bias, out.data_ptr()
            if is_computed(library.pt2mx_linear_of(ctypes.addressof(call), *pointers, parallel_for)):
                return
        element, block_size, rotation, dtype = self._options
        y = torch.ops.pt2mx.linear_mx(x, data, scale, bias, element, block_size, rotation, dtype)
        out.copy_(y.view(out.shape))
