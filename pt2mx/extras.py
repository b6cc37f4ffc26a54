"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pt2mx.errors import MXError


@contextmanager
def without_log_warnings() -> Iterator[None]:
    """Silence log messages below an error and complaints about old syntax, for imports that talk."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            yield
    finally:
        logging.disable(previous)


def import_extra(package: str, extra: str = "") -> Any:
    """Import an optional package. torchvision, and transformers with it, also work as a CUDA build with a CPU torch.

    Args:
        package: its module.
        extra: the extra of pt2mx that installs it; "": none, it is installed by its own name.

    Raises:
        MXError: where it is not installed.
    """
    root = package.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        requirement = f"'pt2mx[{extra}]'" if extra else root
        raise MXError(f"{package} is not installed: pip install {requirement}")
    with without_log_warnings():
        if root in _IMPORT_TORCHVISION and importlib.util.find_spec("torchvision"):
            _make_torchvision_importable()
        for module in _LAZY.get(package, ()):
            importlib.import_module(module)
        return importlib.import_module(package)


#: what a package imports when its models are first asked for, and with it parts of torchao that log
_LAZY = {"transformers": ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")}
_IMPORT_TORCHVISION = ("torchvision", "transformers")

_torchvision_schemas: torch.library.Library | None = None


def _make_torchvision_importable() -> None:
    """Define the two operators without which the import of torchvision fails, also inside transformers.

    The package index has a CUDA build, whose library does not load with a CPU torch. No model here calls the operators,
    so their schemas suffice. Define them only after such a failure: a library that loads defines them itself, and ends
    the process if they exist already.
    """
    global _torchvision_schemas
    before = set(sys.modules)
    try:
        importlib.import_module("torchvision")
    except Exception:  # another error will come again on first use
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _torchvision_schemas = _torchvision_schemas or torch.library.Library("torchvision", "FRAGMENT")
                _torchvision_schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
