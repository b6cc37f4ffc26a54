"""`PageContext`: what a page shows beside the report itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import SupportsFloat

from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.pt2e.quantizer import recipe as recipes
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.sensitivity.recipe_comparison import RecipeComparison
from pt2mx.pt2e.sensitivity.result import Sensitivity

_KINDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "recipe": (str, os.PathLike, MXQuantizer),
    "quality": (Mapping,),
    "comparison": (RecipeComparison, NoneType),
    "sensitivity": (Sensitivity, NoneType),
}


@dataclass(frozen=True)
class PageContext:
    """The arguments of `QuantizationReport.to_html`, which has their meaning."""

    model: str = ""
    recipe: str | os.PathLike[str] | MXQuantizer = ""
    quality: Mapping[str, SupportsFloat] = field(default_factory=dict)
    comparison: RecipeComparison | None = None
    sensitivity: Sensitivity | None = None
    before: GraphModule | ExportedProgram | None = None
    after: GraphModule | ExportedProgram | None = None

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                raise MXError(f"{name} must be {allowed}, not of type {type(value).__name__}")

    @property
    def recipe_name(self) -> str:
        """The name of the recipe, where it has one."""
        return "" if isinstance(self.recipe, MXQuantizer) else os.fspath(self.recipe)

    def recipe_text(self) -> str:
        """The YAML of the recipe; "" where none was given.

        Raises:
            MXError: where a name is that of no recipe, or a quantizer has what no recipe holds.
        """
        if isinstance(self.recipe, MXQuantizer):
            return self.recipe.to_recipe()
        return recipes.text(self.recipe) if self.recipe_name else ""

    def known_quality(self) -> dict[str, float]:
        """The quality as it was given, else that of the recipe in the comparison.

        Raises:
            MXError: where a quality is no number.
        """
        if self.quality or self.comparison is None:
            return {name: _number(name, value) for name, value in self.quality.items()}
        own = [row.quality for row in self.comparison.rows if row.name == self.recipe_name]
        return {self.comparison.metric: own[0]} if own else {}


def _number(name: str, value: SupportsFloat) -> float:
    """A number of any library."""
    try:
        if isinstance(value, SupportsFloat):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        pass
    raise MXError(f"quality[{name!r}] must be a number, not {value!r}")
