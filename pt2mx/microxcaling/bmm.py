"""Products of batches of matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pt2mx.microxcaling.matmul import product_of_matrices
from pt2mx.microxcaling.products import Product
from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test

_BMM: Product = dataclasses.replace(product_of_matrices("a", "a"), forward=lambda a, b, bias: torch.bmm(a, b))


def bmm(in1: Tensor, in2: Tensor, mx_specs: Mapping[str, object] | None = None, name: str | None = None) -> Tensor:
    """Multiply batches of matrices, as `mx.bmm` of microxcaling does: `torch.bmm` with operands in MX blocks along the
    dimensions that it and its gradients reduce.

    Args:
        in1: (batch, rows, features).
        in2: (batch, features, columns).
        mx_specs: as `finalize_mx_specs` returns them; None for torch's own.
        name: a label that changes nothing.

    Returns:
        (batch, rows, columns) in the dtype of the operands.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({"a_elem_format": "fp4_e2m1", "block_size": 4})
        >>> x = torch.tensor([[[1.0, 2.9, -5.9, 0.3]]])
        >>> mx.bmm(x, torch.eye(4).unsqueeze(0), specs)
        tensor([[[ 1.0000,  3.0000, -6.0000,  0.5000]]])
    """
    mx_assert_test(mx_specs)
    return torch.bmm(in1, in2) if mx_specs is None else _BMM(in1, in2, None, apply_mx_specs(mx_specs))
