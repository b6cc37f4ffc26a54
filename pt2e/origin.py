"""The origin that a file names: the versions that wrote it, and the recipe of the model in it."""

from __future__ import annotations

import json
import os
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
    """The origin of a program or package.

    Args:
        pt2mx, torch: versions of the libraries that wrote it.
        recipe: that of the model, in YAML; None where it is not known.
    """

    pt2mx: str | None
    torch: str | None
    recipe: str | None

    @classmethod
    def here(cls, recipe: MXQuantizer | str | None = None) -> Origin:
        """The origin of a file that is written now.

        Args:
            recipe: a quantizer, its YAML, or None.

        Returns:
            This version of pt2mx and of torch, and the recipe as YAML.

        Raises:
            MXError: for a quantizer that no recipe can hold, and for another object.
        """
        if isinstance(recipe, MXQuantizer):
            recipe = recipe.to_recipe()
        if not isinstance(recipe, str | None):
            raise MXError(f"the recipe must be an MXQuantizer, its YAML or None, not {type(recipe).__name__}")
        return cls(__version__, torch.__version__, recipe)

    def extra_files(self) -> dict[str, str]:
        """The origin in JSON, as `torch.export.save(extra_files=...)` takes it."""
        return {_FILE: json.dumps(asdict(self), indent=1)}

    def records(self) -> dict[str, bytes]:
        """The same as files of an archive."""
        return {f"extra/{name}": text.encode() for name, text in self.extra_files().items()}


def origin_of(path: str | os.PathLike[str]) -> Origin | None:
    """Return the origin that a file names which `save_program`, `pt2mx quantize` or `pt2mx compile` wrote.

    Args:
        path: of the file, a program or a package.

    Returns:
        `pt2mx` and `torch`, the versions that wrote it, and `recipe`, the YAML or None. None where the file names no
        origin, as one that `torch.export.save` wrote.

    Raises:
        MXError: where the file is no PT2 archive, or a broken one.

    Example:
        >>> import tempfile, torch, pt2mx
        >>> program = torch.export.export(torch.nn.Linear(64, 8), (torch.ones(1, 64),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pt2mx.save_program(program, f"{folder}/net.pt2", "global: {weight: mxfp8}")
        ...     origin = pt2mx.origin_of(f"{folder}/net.pt2")
        >>> origin.pt2mx == pt2mx.__version__, origin.recipe
        (True, 'global: {weight: mxfp8}')
    """
    content = read_record(path, f"extra/{_FILE}")
    if content is None:
        return None
    origin = _origin(content)
    if origin is None:
        raise MXError(f"{str(path)!r} does not say what wrote it: its record {_FILE} is broken")
    return origin


def _origin(content: bytes) -> Origin | None:
    """The origin in a record, which may hold more; None where it is broken."""
    try:
        record = dict(json.loads(content))
    except (ValueError, TypeError):
        return None
    found = {field.name: record.get(field.name) for field in fields(Origin)}
    return Origin(**found) if all(isinstance(value, str | None) for value in found.values()) else None


def recipe_of(path: str | os.PathLike[str]) -> str | None:
    """The recipe that an archive says its model is of; None where it says none, or cannot be understood."""
    try:
        origin = origin_of(path)
    except MXError:  # `other_version` tells it
        return None
    return origin.recipe if origin else None


def other_version(path: str | os.PathLike[str]) -> str | None:
    """A sentence for the user where another version of pt2mx wrote the archive, or none that is known."""
    try:
        origin = origin_of(path)
    except MXError as error:
        return str(error)
    if origin is None or origin.pt2mx == __version__:
        return None
    return f"{str(path)!r} was written by pt2mx {origin.pt2mx}, and this is {__version__}: compare its numbers"


def warn_of_other_version(path: str | os.PathLike[str]) -> None:
    """Warn where another version of pt2mx wrote the file."""
    if text := other_version(path):
        warnings.warn(text, stacklevel=3)
