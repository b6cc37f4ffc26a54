"""Compare results: `check_diff` raises if they differ, and `fidelity` measures the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.analysis.sums import sqnr_db
from pt2mx.errors import MXError


def check_diff(y1: object, y2: object, tol: float = 0, ntol: int = 0, handle_infs: bool = False) -> None:
    """Raise if two results differ, like the function of this name in the tests of microxcaling and pt2-bfp.

    Args:
        y1, y2: tensors, or trees of tensors as two models return them; other leaves must be equal.
        tol: values agree if their difference is at most `tol * (1 + r)`, where r is the root mean square of y1.
        ntol: number of values of a tensor that may differ.
        handle_infs: whether Inf agrees with Inf of the same sign. NaN agrees with nothing.

    Raises:
        MXError: naming the tensor, how many of its values differ, and the first of them.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e.pt2bfp import check_diff
        >>> check_diff(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), tol=0.1)
        >>> check_diff(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), tol=0.1)
        Traceback (most recent call last):
        pt2mx.errors.MXError: 1 of 2 values differ by more than 0.258114, the first at (1,): 2.0 and 2.5; ...
    """
    (leaves1, tree1), (leaves2, tree2) = pytree.tree_flatten(y1), pytree.tree_flatten(y2)
    if tree1 != tree2:
        raise MXError(f"the results have different structures: {tree1} and {tree2}")
    for i, (leaf1, leaf2) in enumerate(zip(leaves1, leaves2, strict=True)):
        where = f"of result {i}, " if len(leaves1) > 1 else ""
        if isinstance(leaf1, Tensor) and isinstance(leaf2, Tensor):
            _check_tensors(where, leaf1, leaf2, tol, ntol, handle_infs)
        elif isinstance(leaf1, Tensor) or isinstance(leaf2, Tensor) or leaf1 != leaf2:
            raise MXError(f"{where or 'the results are '}{leaf1!r} and {leaf2!r}: they differ")


def _check_tensors(where: str, y1: Tensor, y2: Tensor, tol: float, ntol: int, handle_infs: bool) -> None:
    if y1.shape != y2.shape:
        raise MXError(f"{where}shapes differ: {tuple(y1.shape)} and {tuple(y2.shape)}")
    a, b = (y.detach().cpu().double() for y in (y1, y2))
    same_infs = a.isinf() & (a == b)
    difference = torch.where(same_infs, 0.0, (a - b).abs())
    finite = torch.where(a.isfinite(), a, 0.0)
    allowed = tol * (1 + finite.square().mean().sqrt().item()) if a.numel() else 0.0
    never = ~difference.isfinite() | (same_infs if not handle_infs else False)
    differ = (difference > allowed) | never
    if int(differ.sum()) > ntol or bool(never.any()):
        first = tuple(differ.nonzero()[0].tolist())
        raise MXError(
            f"{where}{int(differ.sum()):,} of {a.numel():,} values differ by more than {allowed:g}, the first at "
            f"{first}: {a[first].item()!r} and {b[first].item()!r}; the largest difference is "
            f"{difference.nan_to_num(torch.inf).max().item():g}"
        )


@dataclass
class ErrorSums:
    """The error of values against a reference, summed over batches.

    Values that are NaN or Inf in the reference (a masked score) are left out.
    """

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    energy: float = 0.0
    max: float = 0.0
    values: int = 0

    def add(self, got: Tensor, want: Tensor) -> None:
        """Add a pair of tensors of one shape."""
        finite = want.isfinite()
        got, want = got[finite].double(), want[finite].double()
        if not want.numel():
            return
        self.signal += want.square().sum().item()
        self.noise += (got - want).square().sum().item()
        self.product += (got * want).sum().item()
        self.energy += got.square().sum().item()
        self.max = max(self.max, (got - want).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item())
        self.values += want.numel()

    @property
    def sqnr(self) -> float:
        """Return the SQNR in dB: Inf where nothing differs, NaN where nothing was compared."""
        if not self.values:
            return math.nan
        return sqnr_db(self.signal, math.inf if math.isnan(self.noise) else self.noise)

    @property
    def cosine(self) -> float:
        """Return the cosine of the two vectors of all values."""
        scale = math.sqrt(self.signal * self.energy)
        return self.product / scale if scale else float(self.signal == self.energy)


class Fidelity(NamedTuple):
    """SQNR in dB, cosine, and the number of values compared."""

    sqnr: float
    cosine: float
    values: int

    def __str__(self) -> str:
        if not self.values:
            return "nothing was compared: no floating output holds a value"
        return f"SQNR {self.sqnr:.1f} dB, cosine {self.cosine:.6f}"


def fidelity(pairs: Iterable[tuple[object, object]]) -> Fidelity:
    """Compare outputs with the outputs of a reference.

    Only floating-point tensors are compared, and only values that are finite in the reference (not masked scores).

    Args:
        pairs: (outputs, reference outputs), trees of tensors.

    Returns:
        `sqnr` in dB and `cosine` over all pairs, NaN if no value is finite; `values`, the number of values compared.
    """
    sums, values = ErrorSums(), 0
    for outputs, references in pairs:
        for output, reference in zip(_floats(outputs), _floats(references), strict=True):
            values += reference.numel()
            sums.add(output, reference)
    if not values:  # outputs without values agree
        return Fidelity(math.inf, 1.0, 0)
    if not sums.values:
        return Fidelity(math.nan, math.nan, values)
    return Fidelity(sums.sqnr, sums.cosine, sums.values)


def describe_agreement(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return in words the `Fidelity` of a host's outputs to a program's, and their largest difference."""
    pairs = zip(_floats(outputs), _floats(expected), strict=True)
    largest = max((float((y - e).abs().nan_to_num().max()) for y, e in pairs if e.numel()), default=0.0)
    return f"{fidelity([(outputs, expected)])}, largest difference {largest:.1e}"


def comparable(got: object, want: object) -> bool:
    """Return whether both are floating tensors of one shape."""
    return is_floating(got) and is_floating(want) and got.shape == want.shape


def is_floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _floats(tree: object) -> list[Tensor]:
    return [tensor.double().cpu() for tensor in tensors_in(tree) if tensor.is_floating_point()]
