"""The keys of settings: operators and classes of modules, by names."""

from __future__ import annotations

import torch

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.quantizer.operators import OPERANDS, OPT_IN, names_of


def operator_key(operator: object) -> str:
    """The name of an operator that can be quantized: "aten.bmm" for `torch.ops.aten.bmm.default` and for that name.

    Raises:
        MXError: for another object, naming the nearest operator.
    """
    name, allowed = _operator_name(operator), _operator_names()
    if name not in allowed:
        raise MXError(f"operator {name!r} cannot be quantized: {nearest(name, sorted(allowed))}")
    return name


def type_key(module_type: type) -> str:
    """The qualified name of a class."""
    return f"{module_type.__module__}.{module_type.__qualname__}"


def object_key(object_type: object) -> tuple[str, str]:
    """The setting kind and the key by which `set_object_type` means an object.

    Raises:
        MXError: for what is neither an operator nor a class.
    """
    if isinstance(object_type, type):
        return "module_type", type_key(object_type)
    name = _operator_name(object_type)
    if callable(object_type) and not isinstance(object_type, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = getattr(object_type, "__name__", name)
    found = next((n for n in (name, f"aten.{name}") if n in _operator_names()), None)
    if found is not None:
        return "operator_type", found
    if isinstance(object_type, str) and object_type and not name.startswith("aten."):
        return "module_type", object_type
    raise MXError(
        f"{object_type!r} is neither a class of modules nor an operator that can be quantized: "
        f"{nearest(name, sorted(_operator_names()))}"
    )


def _operator_names() -> set[str]:
    return {name for overload in (*OPERANDS, *OPT_IN) for name in names_of(overload)}


def _operator_name(operator: object) -> str:
    return str(operator).removeprefix("torch.ops.").removesuffix(".default")
