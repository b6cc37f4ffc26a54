"""The changes that `import pt2mx` makes in the process.

All of them stand here, but for Ctrl-C: the command `pt2mx` alone takes it over, before anything else is imported
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

from pt2mx.late import when_imported

#: registered at once: `torch.ops.pt2mx.*` with kernels, fake kernels, gradients, autocast and docstrings
_OPERATORS = (
    "pt2mx.ops.quantization",
    "pt2mx.ops.linear",
    "pt2mx.ops.convolution",
    "pt2mx.ops.attention",
    "pt2mx.ops.bfloat16_products",
    "pt2mx.ops.scaled_mm",
    "pt2mx.ops.fp8_rows",
    "pt2mx.ops.hadamard",
    "pt2mx.ops.rotated_quantization",
    "pt2mx.ops.quantized_activations",
    "pt2mx.ops.quantized_linear",
    "pt2mx.ops.quantized_convolution",
    "pt2mx.ops.docstrings",
)

#: a module of Inductor -> what registers itself there, once it has been imported
_IN_INDUCTOR = {
    "torch._inductor.decomposition": "pt2mx.ops.inductor",
    "torch._inductor.lowering": "pt2mx.ops.lowerings",
}

#: Calls that torch.fx keeps though nothing reads what they return; torchao's convert removes what it does not keep.
#: Export leaves the first three in a graph that makes an attention mask by vmap, and a region may write: a cache that
#: is updated under torch.no_grad().
_EFFECTS = {
    predispatch: ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"),
    torch.ops.higher_order: (
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "tag_activation_checkpoint",
        "hints_wrapper",
    ),
}

#: modules whose `MXTensor` is a type that `torch.load(weights_only=True)` takes; the first is what older files name
_STORED = ("pt2mx.tensor", "pt2mx.tensor.mx_tensor", "pt2mx.torchmx.mx_tensor")


def prepare_process() -> None:
    """Tell torch what programs, checkpoints and compilers ask for by name."""
    for module in _OPERATORS:
        importlib.import_module(module)
    for before, module in _IN_INDUCTOR.items():
        when_imported(before, functools.partial(importlib.import_module, module))
    torch.compiler.config.cache_key_tag += f"pt2mx-{_digest()}"
    torch.serialization.add_safe_globals([_LateGlobal((module, f"{module}.MXTensor")) for module in _STORED])
    for owner, names in _EFFECTS.items():
        for name in names:
            has_side_effect(getattr(owner, name))


def _digest() -> str:
    """Return a digest of pt2mx's sources. AOTAutograd's cache keys a graph before decomposition: without the
    decompositions' identity in the key, code compiled from an older version of them would be served."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class _LateGlobal(tuple):
    """The pair (type, full name) of torch's safe globals: unpacking it, which torch does where a checkpoint holds what
    it does not know, imports the type, and with it torchao."""

    def __iter__(self) -> Iterator[object]:
        module, name = super().__iter__()
        return iter((importlib.import_module(module).MXTensor, name))
