"""Inductor decompositions of the operators, so that compiled graphs fuse them into their neighbours.

Without them each operator would be an opaque call. Importing this module registers them.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import decomposition, inductor_prims

from pt2mx import ops
from pt2mx.decompositions import decompositions


def _narrow(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """`torch.narrow` of a buffer of its own.

    Inductor's C++ loop splitting (`CppScheduling.try_loop_split`, torch 2.11 to 2.13) turns a loop over n values that
    reads a scale at `i // block` into `n // block` whole blocks and drops the rest. Where the blocks are written out
    before they are cut, no such loop arises.
    """
    if x.device.type == "cpu":
        if all(isinstance(n, int) for n in x.shape):
            x = inductor_prims.force_stride_order(x, torch._prims_common.make_contiguous_strides_for(x.shape))
        else:  # flat: torch 2.11 cannot put symbolic strides in order
            x = inductor_prims.force_stride_order(x.reshape(-1), (1,)).view(x.shape)
    return x.narrow(axis, start, length)


#: operator -> the same in aten operators. Philox stays a call: its rounds use each value twice, which Inductor,
#: substituting values, would double ten times
DECOMPOSITIONS = decompositions(_narrow, ops.random_bits)


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
