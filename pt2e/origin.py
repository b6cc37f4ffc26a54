"""What a file says of its origin: the versions that wrote it, and the recipe of the model in it."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, fields

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.archive import read_record
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.version import __version__

#: the record of a PT2 archive, among what `torch.export.save` calls extra files
_FILE = "pt2mx.json"


@dataclass(frozen=True)
class Origin:
    """What wrote a program or package: versions of pt2mx and torch, and the recipe in YAML, if it is known."""

    pt2mx: str
    torch: str
    recipe: str | None

    @classmethod
    def here(cls, recipe: MXQuantizer | str | None = None) -> Origin:
        """That of a file that is written now.

        Raises:
            MXError: for a quantizer that no recipe can hold, and for another object.
        """
        if isinstance(recipe, MXQuantizer):
            recipe = recipe.to_recipe()
        if not isinstance(recipe, str | None):
            raise MXError(f"the recipe must be an MXQuantizer, its YAML or None, not {type(recipe).__name__}")
        return cls(__version__, torch.__version__, recipe)

    def extra_files(self) -> dict[str, str]:
        """As `torch.export.save(extra_files=...)` takes it."""
        return {_FILE: json.dumps(asdict(self), indent=1)}

    def records(self) -> dict[str, bytes]:
        """The same as files of an archive."""
        return {f"extra/{name}": text.encode() for name, text in self.extra_files().items()}


def origin_of(path: object) -> Origin | None:
    """What a file that `save_program`, `pt2mx quantize` or `pt2mx compile` wrote says of itself; None where it says
    nothing, as what `torch.export.save` wrote.

    Raises:
        MXError: where the file is no PT2 archive, or a broken one.
    """
    content = read_record(path, f"extra/{_FILE}")
    if content is None:
        return None
    try:
        record = dict(json.loads(content))
    except (ValueError, TypeError):
        record = None
    found = [] if record is None else [record.get(field.name) for field in fields(Origin)]  # it may hold others
    if record is None or not all(isinstance(value, str | None) for value in found):
        raise MXError(f"{str(path)!r} does not say what wrote it: its record {_FILE} is broken")
    return Origin(*found)


def recipe_of(path: object) -> str | None:
    """The recipe that an archive says its model is of; None where it says none, or cannot be understood."""
    try:
        origin = origin_of(path)
    except MXError:  # `other_version` tells it
        return None
    return origin.recipe if origin else None


def other_version(path: object) -> str | None:
    """A sentence for the user where another version of pt2mx wrote the archive, or none that is known."""
    try:
        origin = origin_of(path)
    except MXError as error:
        return str(error)
    if origin is None or origin.pt2mx == __version__:
        return None
    return f"{str(path)!r} was written by pt2mx {origin.pt2mx}, and this is {__version__}: compare its numbers"


def warn_of_other_version(path: object) -> None:
    """Warn where another version of pt2mx wrote the file."""
    if text := other_version(path):
        warnings.warn(text, stacklevel=3)
