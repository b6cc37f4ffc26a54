"""The provenance that a program or package records: the versions that wrote it, and the recipe of its model."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, fields

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.files.archive import read_record
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.version import __version__

#: the record of a PT2 archive, among what `torch.export.save` calls extra files
_FILE = "pt2mx.json"


@dataclass(frozen=True)
class Provenance:
    """The versions that wrote a program or package, and the recipe of its model.

    Args:
        pt2mx, torch: versions of the libraries that wrote it.
        recipe: the YAML of the model's recipe; None where it is not known.
    """

    pt2mx: str | None
    torch: str | None
    recipe: str | None

    @classmethod
    def here(cls, recipe: MXQuantizer | str | None = None) -> Provenance:
        """Return the provenance of a file that is written now.

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
        """Return the provenance in JSON, as `torch.export.save(extra_files=...)` takes it."""
        return {_FILE: json.dumps(asdict(self), indent=1)}

    def records(self) -> dict[str, bytes]:
        """Return the same as records of an archive."""
        return {f"extra/{name}": text.encode() for name, text in self.extra_files().items()}


def provenance_of(path: str | os.PathLike[str]) -> Provenance | None:
    """Return the provenance that `save_program`, `pt2mx quantize` and `pt2mx compile` record in a file.

    Args:
        path: of the file, a program or a package.

    Returns:
        `pt2mx` and `torch`, the versions that wrote it, and `recipe`, the YAML or None. None for a file without
        provenance, as `torch.export.save` writes it.

    Raises:
        MXError: where the file is no PT2 archive, or a broken one.

    Example:
        >>> import tempfile, torch, pt2mx
        >>> program = torch.export.export(torch.nn.Linear(64, 8), (torch.ones(1, 64),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pt2mx.save_program(program, f"{folder}/net.pt2", "global: {weight: mxfp8}")
        ...     provenance = pt2mx.provenance_of(f"{folder}/net.pt2")
        >>> provenance.pt2mx == pt2mx.__version__, provenance.recipe
        (True, 'global: {weight: mxfp8}')
    """
    content = read_record(path, f"extra/{_FILE}")
    if content is None:
        return None
    provenance = _parsed(content)
    if provenance is None:
        raise MXError(f"{str(path)!r} does not say what wrote it: its record {_FILE} is broken")
    return provenance


def _parsed(content: bytes) -> Provenance | None:
    """Return the provenance in a record, which may hold more; None where it is broken."""
    try:
        record = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    values = {field.name: record.get(field.name) for field in fields(Provenance)}
    return Provenance(**values) if all(isinstance(value, str | None) for value in values.values()) else None


def recipe_of(path: str | os.PathLike[str]) -> str | None:
    """Return the recipe that an archive records of its model; None without one, and for a broken record."""
    try:
        provenance = provenance_of(path)
    except MXError:  # `other_version` reports it
        return None
    return provenance.recipe if provenance else None


def other_version(path: str | os.PathLike[str]) -> str | None:
    """Return a sentence for the user where another version of pt2mx, or an unknown one, wrote the archive."""
    try:
        provenance = provenance_of(path)
    except MXError as error:
        return str(error)
    if provenance is None or provenance.pt2mx == __version__:
        return None
    return f"{str(path)!r} was written by pt2mx {provenance.pt2mx}, and this is {__version__}: compare its numbers"


def warn_of_other_version(path: str | os.PathLike[str]) -> None:
    """Warn where another version of pt2mx wrote the file."""
    if text := other_version(path):
        warnings.warn(text, stacklevel=3)
