"""How far the outputs of two models agree."""

import math
from collections.abc import Iterable

from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.statistics import sqnr_db


def agreement(pairs: Iterable[tuple[object, object]]) -> tuple[float, float]:
    """SQNR in dB of outputs against those of a reference over all pairs (outputs, those of the reference), trees of
    tensors, and the cosine between them. Tensors that are not floating are left out."""
    signal = noise = product = energy = 0.0
    for outputs, references in pairs:
        for got, want in zip(_floats(outputs), _floats(references), strict=True):
            signal += want.square().sum().item()
            noise += (got - want).square().sum().item()
            product += (got * want).sum().item()
            energy += got.square().sum().item()
    scale = math.sqrt(signal * energy)
    return sqnr_db(signal, noise), product / scale if scale else float(signal == energy)


def _floats(tree: object) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf.double().cpu() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
