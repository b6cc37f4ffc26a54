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
    """`torch.bmm` with operands in MX blocks along the dimensions that it and its gradients reduce.

    Args:
        in1: (batch, rows, features).
        in2: (batch, features, columns).
        mx_specs: None for torch's own.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`.
    """
    mx_assert_test(mx_specs)
    return torch.bmm(in1, in2) if mx_specs is None else _BMM(in1, in2, None, apply_mx_specs(mx_specs))
