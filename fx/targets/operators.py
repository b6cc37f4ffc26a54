"""Operators of other libraries: theirs where they are installed, else a definition by the same schema."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import library
from torch._ops import OpOverload

from pt2mx.extras import without_log_warnings

#: the definitions made here; a library that is deleted takes its operators with it
_LIBRARIES: list[library.Library] = []


def operator_of(name: str, schema: str, home: str, function: Callable[..., Any]) -> OpOverload:
    """Return an operator of another library.

    Args:
        name: "namespace::operator".
        schema: the arguments and the result, as "(Tensor x) -> Tensor".
        home: the module that defines the operator when it is imported.
        function: computes the operator, for a definition made here; of meta tensors, too.
    """
    namespace, operator = name.split("::")
    if not _is_defined(namespace, operator) and importlib.util.find_spec(home.partition(".")[0]) is not None:
        with without_log_warnings():
            importlib.import_module(home)
    if not _is_defined(namespace, operator):
        fragment = library.Library(namespace, "FRAGMENT")
        fragment.define(operator + schema)
        fragment.impl(operator, function, "CompositeExplicitAutograd")
        _LIBRARIES.append(fragment)
    return getattr(getattr(torch.ops, namespace), operator).default


def _is_defined(namespace: str, operator: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), operator)
