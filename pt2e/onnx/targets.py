"""The targets of ONNX files: how the nodes of the domain `pt2mx` are written."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pt2mx.errors import MXError, nearest

#: target -> the function, by its module, that rewrites the nodes of the domain `pt2mx` in a model and returns it
TARGETS = {
    "pt2mx": ("pt2mx.pt2e.onnx.bodies", "add_bodies"),
    "quark": ("pt2mx.pt2e.onnx.quark", "to_quark"),
    "standard": ("pt2mx.pt2e.onnx.standard", "to_standard"),
}


def rewriter_of(target: object) -> Callable[[Any], Any]:
    """The function that rewrites the nodes of the domain `pt2mx` in a model, and returns it.

    Raises:
        MXError: for an unknown target.
    """
    if not isinstance(target, str) or target not in TARGETS:
        raise MXError(f"unknown target {target!r}: {nearest(target, TARGETS)}")
    module, function = TARGETS[target]
    return getattr(importlib.import_module(module), function)
