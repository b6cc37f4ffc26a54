"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from contextlib import contextmanager

import torch

from pt2mx.errors import MXError


@contextmanager
def without_log_warnings():
    """No log message below an error and no complaint about old syntax, for imports that talk."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            yield
    finally:
        logging.disable(previous)


def import_extra(package: str, extra: str) -> object:
    """An optional package; torchvision and transformers need the way around a CUDA build beside a CPU torch."""
    if importlib.util.find_spec(package) is None:
        raise MXError(f"{package} is not installed: pip install 'pt2mx[{extra}]'")
    _define_torchvision_operators()
    with without_log_warnings():
        for module in _LAZY.get(package, ()):
            importlib.import_module(module)
        return importlib.import_module(package)


#: what a package imports on first use only, and with it parts of torchao that log
_LAZY = {"transformers": ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")}

_torchvision_schemas: torch.library.Library | None = None


def _define_torchvision_operators() -> None:
    """torchvision from the package index is a CUDA build: beside a CPU torch its library does not load, and its import
    (also inside transformers) fails for want of two operators that no model here needs. Their schemas suffice."""
    global _torchvision_schemas
    if _torchvision_schemas is None and torch.version.cuda is None and importlib.util.find_spec("torchvision"):
        _torchvision_schemas = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _torchvision_schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
