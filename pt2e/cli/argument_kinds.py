"""The kinds of arguments of a command line as data. This module imports no torch, which takes seconds."""

from __future__ import annotations

from typing import Any, NamedTuple


class Argument(NamedTuple):
    """The arguments of a call of `argparse.ArgumentParser.add_argument`."""

    names: tuple[str, ...]
    options: dict[str, Any]


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument, described as for `add_argument`."""
    return Argument(names, options)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return argument(name, action="store_true", help=text)


def several(name: str, text: str, **options: Any) -> Argument:
    """Return an option with one value or more, which may be given several times."""
    return argument(name, nargs="+", action="extend", default=[], help=text, **options)


def repeated(name: str, text: str, **options: Any) -> Argument:
    """Return an option with one value, which may be given several times."""
    return argument(name, action="append", help=text, **options)


def device(meaning: str) -> Argument:
    """Return the option `--device`."""
    return argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"{meaning} (default: cpu)")
