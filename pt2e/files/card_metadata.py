"""The metadata of model cards, at the head of README.md, and what a model takes over from those that it was made of.

The Hub reads the metadata. Under `pt2mx` they keep what no other file of the folder says, so that a card can be written
again. This module imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pt2mx.pt2e.files.output import whole_file

README, RECIPE, REPORT = "README.md", "recipe.yaml", "report.json"
#: files with the terms of a model
TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
#: the key of pt2mx's own metadata
OWN = "pt2mx"
#: metadata of a float model that also hold for a quantized one
_OF_BASE = ("license", "license_name", "license_link", "language", "pipeline_tag")
#: pt2mx's own metadata that a model takes over from the one that it was made of: nothing that was measured
_INHERITED = ("version", "base", "commands")
#: the order of metadata in a card; others follow, and pt2mx's own are the last
_ORDER = (*_OF_BASE[:-1], "base_model", "base_model_relation", "library_name", "pipeline_tag", "tags")
_BLOCK = re.compile(r"\A---\n(.*?)\n---(?:\n|\Z)", re.DOTALL)

Folder = str | os.PathLike[str]


class _Loader(yaml.SafeLoader):
    """Takes `no` for a text, as the Hub does: it is Norwegian."""


_Loader.yaml_implicit_resolvers = {
    first: [row for row in rows if row[0] != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Origin(NamedTuple):
    """A model of which another was made.

    Args:
        name: its name on the Hub, or the name of its folder.
        on_hub: True for a name on the Hub.
        folder: its files, or those of them that are known; None: none are.
    """

    name: str
    on_hub: bool
    folder: Path | None


def metadata_of(folder: Folder) -> dict[str, Any]:
    """Return the metadata in the README.md of a folder; empty where there are none that can be read."""
    try:
        block = _BLOCK.match((Path(folder) / README).read_text(encoding="utf-8"))
        content = yaml.load(block[1], _Loader) if block else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def is_own(metadata: dict[str, Any]) -> bool:
    """Return True for metadata that pt2mx wrote."""
    return isinstance(metadata.get(OWN), dict)


def may_write_card(folder: Folder) -> bool:
    """Return False for a folder whose README.md another hand wrote."""
    return not (Path(folder) / README).exists() or is_own(metadata_of(folder))


def known_metadata(folder: Folder) -> dict[str, Any]:
    """Return the metadata of a folder's card; of a README.md that another hand wrote, those that hold for any card."""
    metadata = metadata_of(folder)
    return metadata if is_own(metadata) else _selected(metadata, _OF_BASE)


def made_of(origins: Iterable[Origin]) -> dict[str, Any]:
    """Return the metadata of what was made of models, the float model first."""
    metadata: dict[str, Any] = {}
    for origin in origins:
        known = {} if origin.folder is None else metadata_of(origin.folder)
        metadata |= _selected(known, _OF_BASE)
        if is_own(known):
            metadata |= _selected(known, ("base_model",))
            metadata[OWN] = _selected(known[OWN], _INHERITED)
        elif origin.on_hub:
            metadata["base_model"] = origin.name
        else:
            metadata[OWN] = {"base": origin.name}
    return metadata


def copy_files(source: Folder, folder: Folder, patterns: Iterable[str], *, replace: bool) -> None:
    """Copy the files that patterns match to another folder; without `replace` only those that it lacks."""
    if Path(source).resolve() == Path(folder).resolve():
        return
    files = [file for pattern in patterns for file in Path(source).glob(pattern)]
    for file in filter(Path.is_file, files):
        target = Path(folder) / file.name
        if replace or not target.exists():
            with whole_file(target) as copy:
                copy.write(file.read_bytes())


def head_of(metadata: dict[str, Any]) -> str:
    """Return the head of a README.md with metadata."""
    keys = dict.fromkeys((*_ORDER, *(key for key in metadata if key != OWN), OWN))
    text = yaml.safe_dump(_selected(metadata, keys), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---\n"


def _selected(metadata: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: metadata[key] for key in keys if key in metadata}
