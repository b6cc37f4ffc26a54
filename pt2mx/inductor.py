"""Inductor decompositions of the operators, so that compiled graphs fuse them into their neighbours.

Without them each operator would be an opaque call. Importing this module registers them.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import decomposition, inductor_prims

from pt2mx import ops
from pt2mx.checks import check_input, check_packed
from pt2mx.kernels import reference


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


def _random(x, spec, seed=None, *ste):
    seed = ops.seed_of(x, spec, seed)
    # Philox stays a call: its rounds use each value twice, which Inductor, substituting values, would double ten times
    return None if seed is None else ops.random_bits(seed, x.shape)


def _quantize(x, *arguments):
    spec, x = check_input(x, *arguments[:5]), torch.atleast_1d(x)
    return reference.quantize(x, spec, _random(x, spec, *arguments[5:]), _narrow)


def _dequantize(data, scale, elem, block_size, dtype, *where):
    spec, length = check_packed(data, scale, elem, block_size, dtype, *where)
    return reference.dequantize(data, scale, spec, dtype, length, _narrow)


def _fake_quantize(x, *arguments):
    spec, row = check_input(x, *arguments[:5]), torch.atleast_1d(x)
    return reference.fake_quantize(row, spec, _random(row, spec, *arguments[5:]), _narrow).reshape(x.shape)


def _clip_gradient(grad, x, *modes):
    spec, rows = check_input(x, *modes), (torch.atleast_1d(grad), torch.atleast_1d(x))
    return reference.clip_gradient(*rows, spec, _narrow).reshape(x.shape)


#: operator -> the same in aten operators
DECOMPOSITIONS = {
    ops.quantize_mx: _quantize,
    ops.dequantize_mx: _dequantize,
    ops.fake_quantize_mx: _fake_quantize,
    ops.clip_gradient_mx: _clip_gradient,
}


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
