"""Inductor decompositions of the operators, so that compiled graphs fuse them into their neighbours.

Without them each operator would be an opaque call. Importing this module registers them: `pt2mx.register` does, once
Inductor's table has been imported. What needs Inductor's lowerings stands in `pt2mx.ops.lowerings`.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, decomposition
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.nn import functional

from pt2mx import ops
from pt2mx.kernels import elements
from pt2mx.kernels.axis import guards
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.ops.activation_decompositions import ACTIVATION_DECOMPOSITIONS
from pt2mx.ops.bfloat16_products import attention_bfloat16, dense_attention
from pt2mx.ops.decompositions import decompositions
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.linear import linear_mx
from pt2mx.spec import MXSpec

#: computes nothing: for tracing the values are contiguous, in memory they may lie as Inductor wants, cut from a tensor
#: with filled blocks for example
torch.library.define("pt2mx::dense", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("pt2mx::dense", "CompositeExplicitAutograd")
@torch.library.register_fake("pt2mx::dense")
def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


#: type of device -> the module with the functions of `elements` for its compiler, which imports Inductor's lowerings
_FORMS = {"cpu": "pt2mx.kernels.inductor.cpu", "cuda": "pt2mx.kernels.inductor.gpu"}


def _forms_for(x: Tensor) -> ModuleType:
    return importlib.import_module(_FORMS.get(x.device.type, elements.__name__))


#: rows from which a product on the CPU takes the time of the dense one: Inductor may as well see all of it
_DENSE_ROWS = 128


def _linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    elem: str,
    block_size: int,
    rotation: int = 0,
    target_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear_mx` of many rows; of few or an unknown number it stays a call, and where `linear` has a faster kernel."""
    known = all(isinstance(n, int) for n in x.shape[:-1])  # asking a symbolic size for its number would fix it
    if x.device.type != "cpu" or not known or x.shape[:-1].numel() < _DENSE_ROWS:
        return NotImplemented
    if target_dtype is not None and cpu_linear.has_units(MXSpec(elem, block_size), x.shape[-1]):
        return NotImplemented
    weight = ops.dequantize_mx(data, scale, elem, block_size, target_dtype or x.dtype, -1, x.shape[-1])
    x = hadamard(x, rotation) if rotation else x
    return functional.linear(x.to(weight.dtype), weight, bias)


def _unless_calls_are_cheap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition that leaves a call where one takes no longer than its kernel: on a GPU it takes several
    times as long as a small one, but in CUDA graphs."""

    @functools.wraps(function)
    def run(x: Tensor, *args: object) -> object:
        return NotImplemented if _calls_are_cheap(x) else function(x, *args)

    return run


def _calls_are_cheap(x: Tensor) -> bool:
    return x.device.type != "cuda" or config.triton.cudagraphs


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    target_dtype: torch.dtype | None = None,
    *quantization: Any,
) -> Tensor:
    """`attention_bfloat16` in bfloat16, where a call takes longer; in float32 torch's kernel takes longer yet."""
    if _calls_are_cheap(query) or (target_dtype or query.dtype) != torch.bfloat16:
        return NotImplemented
    return dense_attention(query, key, value, mask, is_causal, scale, target_dtype, *quantization)


def _with_its_guards(function: Callable) -> Callable:
    """Return a decomposition that tells whether its sizes are guarded: torch.compile guards those that it asks for,
    AOTInductor does not."""

    @functools.wraps(function)
    def run(*args: object) -> object:
        with guards(not V.aot_compilation):
            return function(*args)

    return run


#: operator -> the same in aten operators. Philox stays a call: its rounds use each value twice, which Inductor,
#: substituting values, would double ten times
_OF_OPERATORS: dict[OpOverload, Callable[..., Any]] = {
    **decompositions(ops.random_bits, _forms_for, torch.ops.pt2mx.dense.default),
    linear_mx: _linear,
    attention_bfloat16: _attention,
    **{operator: _unless_calls_are_cheap(function) for operator, function in ACTIVATION_DECOMPOSITIONS.items()},
}
DECOMPOSITIONS = {operator: _with_its_guards(function) for operator, function in _OF_OPERATORS.items()}


def _register() -> None:
    for operator, function in DECOMPOSITIONS.items():
        decomposition.register_decomposition(operator)(function)
    # Inductor copies its table on the first compile, which may lie before this import.
    decomposition.fast_random_decomps.cache_clear()


_register()
