"""The agreement of the outputs of two models."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.analysis.sums import sqnr_db


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
