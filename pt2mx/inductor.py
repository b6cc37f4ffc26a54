"""Inductor decompositions of the operators, so that compiled graphs fuse them into their neighbours.

Without them each operator would be an opaque call. Importing this module registers them.
"""

import hashlib
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch._inductor import decomposition

from pt2mx import ops
from pt2mx.decompositions import decompositions
from pt2mx.kernels import elements, inductor_cpu


def _forms_for(x: Tensor) -> ModuleType:
    return inductor_cpu if x.device.type == "cpu" else elements


#: operator -> the same in aten operators. Philox stays a call: its rounds use each value twice, which Inductor,
#: substituting values, would double ten times
DECOMPOSITIONS = decompositions(ops.random_bits, _forms_for)


def _register() -> None:
    for operator, function in DECOMPOSITIONS.items():
        decomposition.register_decomposition(operator)(function)
    # Inductor copies its table on the first compile, which may lie before this import.
    decomposition.fast_random_decomps.cache_clear()
    # AOTAutograd's cache keys a graph before decomposition: without the decompositions' identity in the key, code
    # compiled from an older version of them would be served.
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *here.glob("kernels/*.py")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    torch.compiler.config.cache_key_tag += f"pt2mx-{digest}"


_register()
