"""One entry of the contract, and phrases that several entries use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pt2mx.modes import ROUNDINGS
from pt2mx.ops import operator as declaration


@dataclass(frozen=True)
class Operator:
    """One operator: what it does, its arguments and results by name. Arguments that several have are `SHARED`."""

    version: int
    what: str
    results: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)


def declared(operator: type[declaration.Operator]) -> Operator:
    """Return the entry of an operator that a class declares."""
    meanings = {argument.name: argument.meaning for argument in operator.arguments}
    return Operator(operator.version, operator.summary(), dict(operator.results), meanings)


def choices(names: Iterable[str]) -> str:
    """Return names as they stand in the document."""
    return ", ".join(f"`{name}`" for name in names)


NOT_RANDOM = f"how values are rounded: {choices(r for r in ROUNDINGS if not ROUNDINGS[r].random)}"
