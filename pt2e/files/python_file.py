"""Run a Python file of the user as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from pt2mx.errors import MXError


def import_file(path: str) -> ModuleType:
    """Run a file whose name ends in .py, and return the module, which is also found by the name of the file.

    Raises:
        MXError: for a file with another name.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise MXError(f"{path!r} is no Python file: give one whose name ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
