"""Register operators, Inductor's lowerings, safe globals and cache keys in the process when `pt2mx` is imported.

Nothing else in pt2mx changes the process, except that the command `pt2mx` handles Ctrl-C
(`pt2mx.sigint`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._functorch import predispatch
from torch.fx.node import has_side_effect

from pt2mx.lazy_import import on_import

#: a module of Inductor -> the function of `pt2mx.ops.inductor` that registers there, called right after its import
_IN_INDUCTOR = {
    "torch._inductor.decomposition": "register_decompositions",
    "torch._inductor.lowering": "register_lowerings",
}

#: Calls that torch.fx keeps even if nothing uses their results; torchao's convert removes all others without users.
#: Export leaves the first three in a graph that makes an attention mask by vmap. A region may write, as a cache that is
#: updated under torch.no_grad().
_EFFECTS = {
    predispatch: ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"),
    torch.ops.higher_order: (
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "tag_activation_checkpoint",
        "hints_wrapper",
    ),
}

#: modules under whose name `torch.load(weights_only=True)` accepts `MXTensor`; files of older versions name the first
_MX_TENSOR_MODULES = ("pt2mx.tensor", "pt2mx.tensor.mx_tensor", "pt2mx.torchmx.mx_tensor")


@functools.cache  # once, though `importlib.reload(pt2mx)` asks again: Inductor refuses a second decomposition
def register_all() -> None:
    """Register with torch what programs, checkpoints and compilers look up by name."""
    importlib.import_module("pt2mx.ops.contract")  # defines `torch.ops.pt2mx.*`, with kernels and gradients
    for module, function in _IN_INDUCTOR.items():
        on_import(module, functools.partial(_register_in_inductor, function))
    torch.compiler.config.cache_key_tag += f"pt2mx-{_digest()}"
    torch.serialization.add_safe_globals([_LazyGlobal((module, f"{module}.MXTensor")) for module in _MX_TENSOR_MODULES])
    for owner, names in _EFFECTS.items():
        for name in names:
            has_side_effect(getattr(owner, name))


def _register_in_inductor(function: str) -> None:
    getattr(importlib.import_module("pt2mx.ops.inductor"), function)()


def _digest() -> str:
    """Return a digest of pt2mx's sources. AOTAutograd's cache keys a graph before decomposition, so the key
    must change with the decompositions: otherwise the cache would return code compiled from older ones."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class _LazyGlobal(tuple):
    """The pair (type, full name) of torch's safe globals. Unpacking it imports the type, and torchao with it; torch
    unpacks it only for a checkpoint with a type that it does not know."""

    def __iter__(self) -> Iterator[object]:
        module, name = super().__iter__()
        return iter((importlib.import_module(module).MXTensor, name))
