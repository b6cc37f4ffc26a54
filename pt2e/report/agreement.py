"""Compare results: `check_diff` raises where they differ, `fidelity` measures by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.analysis.sums import sqnr_db
from pt2mx.errors import MXError


def check_diff(y1: object, y2: object, tol: float = 0, ntol: int = 0, handle_infs: bool = False) -> None:
    """Raise where two results differ, as the function of this name in the tests of microxcaling and pt2-bfp does.

    Args:
        y1, y2: tensors, or trees of tensors as two models return them; of other leaves equality is asked.
        tol: values agree whose difference is at most `tol * (1 + r)`, r being the root mean square of y1.
        ntol: how many values of a tensor may differ nonetheless.
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


class Fidelity(NamedTuple):
    """SQNR in dB, the cosine, and of how many values."""

    sqnr: float
    cosine: float
    values: int

    def __str__(self) -> str:
        if not self.values:
            return "nothing was compared: no floating output holds a value"
        return f"SQNR {self.sqnr:.1f} dB, cosine {self.cosine:.6f}"


def fidelity(pairs: Iterable[tuple[object, object]]) -> Fidelity:
    """Compare outputs with those of a reference.

    Left out are tensors that are not floating, and values that are NaN or Inf in the reference (a masked score).

    Args:
        pairs: (outputs, those of the reference), trees of tensors.

    Returns:
        `sqnr` in dB and `cosine` over all pairs, NaN where no finite value is left of some; `values`, the number of
        values compared.
    """
    signal = noise = product = energy = 0.0
    values = compared = 0
    for outputs, references in pairs:
        for got, want in zip(_floats(outputs), _floats(references), strict=True):
            finite = want.isfinite()
            values, compared = values + want.numel(), compared + int(finite.sum())
            got, want = got[finite], want[finite]
            signal += want.square().sum().item()
            noise += (got - want).square().sum().item()
            product += (got * want).sum().item()
            energy += got.square().sum().item()
    if values and not compared:
        return Fidelity(math.nan, math.nan, values)
    scale = math.sqrt(signal * energy)
    cosine = product / scale if scale else float(signal == energy)
    return Fidelity(sqnr_db(signal, math.inf if math.isnan(noise) else noise), cosine, compared)


def _floats(tree: object) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf.double().cpu() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
