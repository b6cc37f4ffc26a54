"""Tell passes whether the kernels on an NVIDIA GPU support a use of them, and are faster.

Each function takes the tensor that the kernel computes, on that device, and facts. No function needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.kernels.constants import supports_bf16x2
from pt2mx.kernels.scaled_mm import Form
from pt2mx.spec import MXSpec

#: most keys for which bfloat16 attention without a mask is faster than torch's
_MOST_KEYS = 128
#: compute capabilities of GPUs whose tensor cores multiply FP8 at twice the rate of bfloat16
_WITH_FP8 = (8, 9), (9, 0)


def attends_in_bfloat16(y: Tensor, sizes: Sequence[object], is_masked: bool) -> bool:
    """Return whether attention is faster than torch's. `sizes`: B, heads, queries, keys, width."""
    keys = sizes[3]
    return y.dtype != torch.bfloat16 or is_masked or (isinstance(keys, int) and keys <= _MOST_KEYS)


def quantizes_rows(x: Tensor, quantization: MXSpec) -> bool:
    """Return whether the kernel that computes an activation or a norm of x can quantize it."""
    return supports_bf16x2(quantization, x.shape[-1], x.dtype)


def attends(query: Tensor, *_: Tensor) -> bool:
    """Return whether the kernel of `decoding_attention` supports a query."""
    return query.dtype == torch.bfloat16


def reads_mma_layout(codes: Tensor, element: str) -> bool:
    """Return whether kernels decode an element in the MMA layout: E4M3 takes an instruction of compute capability
    8.9."""
    return element != "fp8_e4m3" or torch.cuda.get_device_capability(codes.device) >= (8, 9)


def has_fp8(y: Tensor) -> bool:
    """Return whether tensor cores multiply FP8 faster than bfloat16."""
    return torch.cuda.get_device_capability(y.device) in _WITH_FP8


def has_mx(y: Tensor, form: Form) -> bool:
    """Return whether tensor cores multiply two MX elements."""
    return torch.cuda.get_device_capability(y.device)[0] in form.majors
