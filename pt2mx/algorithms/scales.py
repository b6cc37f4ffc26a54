"""Choose the scales of a weight's blocks before its values are rounded.

A weight is a matrix (N, K) here, and blocks run along K. K may consist of several lines, such as the taps of a
convolution with their channels; a block ends with its line.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels import elements, exponent_scales
from pt2mx.spec import MXSpec

#: changes of a block's exponent that `block_exponents` compares where inputs are known
_OFFSETS = (0, -1, 1)
#: exponents whose powers of two, and their reciprocals, are normal in fp32
LIMIT = 126


def block_exponents(
    weight: Tensor, spec: MXSpec, *, importance: Tensor | None = None, line: int | None = None
) -> Tensor:
    """Choose the shared exponent of each block.

    Without `importance`, the spec's scale mode chooses it. With it, choose among the exponent of the scale mode and its
    two neighbours the one with the smallest squared error, weighted per column: the error of the matmul for
    independent columns of x.

    Args:
        weight: (N, K) float.
        spec: the format; its axis has no meaning here.
        importance: (K,) mean squares of the columns of x, or None.
        line: columns of a line; None: K.

    Returns:
        (N, blocks) int32, the blocks of the first line first.

    Raises:
        MXError: for a weight that is no matrix, a line that does not divide K, an importance of another size, and a
            format whose scales have a significand.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.algorithms import block_exponents
        >>> block_exponents(torch.tensor([[1.0, 7.0, 6.0, 48.0]]), pt2mx.MXSpec("mxfp4", 2))
        tensor([[0, 3]], dtype=torch.int32)
    """
    check_matrix(weight)
    if not spec.scale_format.is_power_of_two:
        raise MXError(f"{spec} has scales with a significand, not exponents: use pt2mx.algorithms.block_scales")
    if importance is not None and importance.shape != weight.shape[1:]:
        raise MXError(f"the importance of {weight.shape[1]} columns has the shape {tuple(importance.shape)}")
    blocks = to_blocks(weight.float(), spec, line)  # (N, blocks, block)
    whole = spec.replace(axis=1, block_size=blocks.shape[2])
    exponent, _ = exponent_scales.shared_exponent(blocks, whole)  # (N, blocks, 1)
    if importance is None:
        return exponent.clamp(-LIMIT, LIMIT).squeeze(2)
    weights = to_blocks(importance.float().unsqueeze(0), spec, line)
    candidates, errors = [], []
    for offset in _OFFSETS:
        candidates.append((exponent + offset).clamp(-LIMIT, LIMIT))
        error = (_rounded(blocks, candidates[-1], spec) - blocks).square() * weights
        errors.append(error.sum(2, keepdim=True))
    best = torch.stack(errors).argmin(0, keepdim=True)  # of equal ones the first
    return torch.stack(candidates).gather(0, best).squeeze(0).squeeze(2)


def round_to_blocks(weight: Tensor, exponents: Tensor, spec: MXSpec, *, line: int | None = None) -> Tensor:
    """Round each value to the nearest one of its block's scale.

    Args:
        weight: (N, K) float.
        exponents: (N, blocks) int32, as `block_exponents` gives them.
        spec, line: as there.

    Returns:
        (N, K) float32 values of the format.

    Raises:
        MXError: as `block_exponents`, and for exponents that it does not give: of another shape, or beyond +-126.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.algorithms import round_to_blocks
        >>> round_to_blocks(torch.tensor([[1.1, 7.0]]), torch.tensor([[0]]), pt2mx.MXSpec("mxfp4", 2))
        tensor([[1., 6.]])
    """
    check_matrix(weight)
    check_exponents(exponents, weight, spec, line)
    blocks = to_blocks(weight.float(), spec, line)
    rounded = _rounded(blocks, exponents.unsqueeze(2), spec).flatten(1)
    line = check_line(weight.shape[1], line)
    lines = rounded.unflatten(1, (weight.shape[1] // line, -1))
    return lines[:, :, :line].flatten(1)


def to_blocks(weight: Tensor, spec: MXSpec, line: int | None) -> Tensor:
    """(N, K) -> (N, blocks, block), zeros behind the values of a ragged block."""
    line = check_line(weight.shape[1], line)
    block = min(spec.block_size, line)
    lines = weight.unflatten(1, (-1, line))
    lines = torch.nn.functional.pad(lines, (0, -line % block))
    return lines.unflatten(2, (-1, block)).flatten(1, 2)


def scales_of_values(exponents: Tensor, k: int, spec: MXSpec, line: int | None) -> Tensor:
    """(N, blocks) -> the scale of each of `k` columns, (N, K) float32 powers of two."""
    line = check_line(k, line)
    blocks_of_line = -(-line // spec.block_size)
    column = torch.arange(k, device=exponents.device)
    block = column // line * blocks_of_line + column % line // spec.block_size
    return elements.pow2(exponents.int())[:, block]


def check_matrix(weight: Tensor) -> None:
    if weight.dim() != 2:
        raise MXError(f"the weight must be a matrix (N, K), not of shape {tuple(weight.shape)}")


def check_exponents(exponents: Tensor, weight: Tensor, spec: MXSpec, line: int | None) -> None:
    """Raise an MXError for exponents that do not belong to the blocks of a weight."""
    line = check_line(weight.shape[1], line)
    shape = (len(weight), weight.shape[1] // line * -(-line // spec.block_size))
    if exponents.shape != shape or exponents.is_floating_point() or exponents.is_complex():
        actual = f"{exponents.dtype} of shape {tuple(exponents.shape)}"
        raise MXError(f"the exponents of these blocks must be integers of shape {shape}, not {actual}")
    if exponents.numel() and exponents.abs().max() > LIMIT:
        raise MXError(f"exponents must lie within +-{LIMIT}")


def check_line(k: int, line: int | None) -> int:
    """The columns of a line."""
    line = k if line is None else line
    if line < 1 or k % line:
        raise MXError(f"lines of {line} columns do not divide a weight of {k}: give the channels of a tap")
    return line


def _rounded(blocks: Tensor, exponents: Tensor, spec: MXSpec) -> Tensor:
    exponents = exponents.int()
    units = elements.round_to_element(blocks * elements.pow2(-exponents), spec.element, spec.rounding)
    return units * elements.pow2(exponents)
