"""The names of the recipes that pt2mx ships. This module imports no torch: the command line names them in `--help`."""

from importlib import resources


def names() -> list[str]:
    """Return the names of the recipes that pt2mx ships."""
    folder = resources.files("pt2mx.configs")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
