"""Inductor's decompositions of the operators, so that compiled graphs fuse them into their neighbours, and its
lowerings of those that stay calls. `pt2mx.register` registers both, once Inductor's own tables have been imported.
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

from pt2mx.kernels import elements
from pt2mx.kernels.packing import guards
from pt2mx.kernels.select import supports
from pt2mx.ops.activations import ActivationFakeQuantize, LayerNormFakeQuantize
from pt2mx.ops.attention import AttentionBfloat16, AttentionMX
from pt2mx.ops.decoding import DecodingAttention
from pt2mx.ops.decompositions import decompositions
from pt2mx.ops.fp8_rowwise import LayerNormFP8Rows, MmFP8Rows, QuantizeFP8Rows
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.linear import LinearMX
from pt2mx.ops.operator import Operator
from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize
from pt2mx.ops.quantize_epilogue import Conv2dFakeQuantize, LinearFakeQuantize
from pt2mx.ops.stochastic import random_bits
from pt2mx.ops.tensor_scale import TensorScale

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


#: rows from which a packed matmul on the CPU takes as long as a dense one: Inductor then sees all of it
_DENSE_ROWS = 128


def _linear(call: LinearMX[Tensor]) -> Tensor:
    """`linear_mx` of many rows; of few or an unknown number it stays a call, and where a faster kernel takes it."""
    x, dtype = call.x, call.target_dtype
    known = all(isinstance(n, int) for n in x.shape[:-1])  # asking a symbolic size for its number would fix it
    if x.device.type != "cpu" or not known or x.shape[:-1].numel() < _DENSE_ROWS:
        return NotImplemented
    if dtype is not None and supports("multiply by packed weights", x, call.spec, x.shape[-1]):
        return NotImplemented
    weight = call.weight(dtype or x.dtype, x.shape[-1])
    x = hadamard(x, call.rotation, -1) if call.rotation else x
    return functional.linear(x.to(weight.dtype), weight, call.bias)


def _unless_calls_are_cheap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition that leaves a call where one takes no longer than its kernel: on a GPU it takes several
    times as long as a small one, but in CUDA graphs."""

    @functools.wraps(function)
    def run(x: Tensor, *args: object) -> object:
        return NotImplemented if _calls_are_cheap(x) else function(x, *args)

    return run


def _calls_are_cheap(x: Tensor) -> bool:
    return x.device.type != "cuda" or config.triton.cudagraphs


def _attention(call: AttentionBfloat16[Tensor]) -> Tensor:
    """`attention_bfloat16` in bfloat16, where a call takes longer; in float32 torch's kernel takes longer yet."""
    if _calls_are_cheap(call.query) or (call.target_dtype or call.query.dtype) != torch.bfloat16:
        return NotImplemented
    return call.decompose()


def _with_its_guards(function: Callable) -> Callable:
    """Return a decomposition that tells whether its sizes are guarded: torch.compile guards those that it asks for,
    AOTInductor does not."""

    @functools.wraps(function)
    def run(*args: object) -> object:
        with guards(not V.aot_compilation):
            return function(*args)

    return run


#: quantized where they are computed: Inductor keeps calls of them where a call is cheap
_ACTIVATIONS = ActivationFakeQuantize, LayerNormFakeQuantize, QuantizeFP8Rows, LayerNormFP8Rows, MmFP8Rows

#: operator -> the same in aten operators. Philox stays a call: its rounds use each value twice, which Inductor,
#: substituting values, would double ten times
DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    operator: _with_its_guards(function)
    for operator, function in {
        **decompositions(random_bits, _forms_for, torch.ops.pt2mx.dense.default),
        LinearMX.overload: LinearMX.function(_linear),
        AttentionBfloat16.overload: AttentionBfloat16.function(_attention),
        **{cls.overload: _unless_calls_are_cheap(cls.function(cls.decompose)) for cls in _ACTIVATIONS},
    }.items()
}


def register_decompositions() -> None:
    """Add the decompositions to Inductor's table, once it has been imported."""
    for operator, function in DECOMPOSITIONS.items():
        decomposition.register_decomposition(operator)(function)
    # Inductor copies its table on the first compile, which may lie before this import.
    decomposition.fast_random_decomps.cache_clear()


def _realized(x: Any) -> Any:
    x.realize()
    return x


def register_lowerings() -> None:
    """Register Inductor's lowerings of the operators that its graphs still call, once its own have been imported."""
    from torch._inductor import lowering

    lowering.register_lowering(torch.ops.pt2mx.dense, type_promotion_kind=None)(lambda x: x)
    lowering.register_lowering(torch.ops.pt2mx.stored, type_promotion_kind=None)(_realized)
    quantizing = Quantize, Dequantize, FakeQuantize, ClipGradient, TensorScale
    for cls in (AttentionBfloat16, LinearFakeQuantize, Conv2dFakeQuantize, *_ACTIVATIONS, *quantizing):
        lowering.make_fallback(cls.overload, warn=False, override_decomp=True)
    lowering.make_fallback(LinearMX.overload, lowering.constrain_to_fx_strides, warn=False, override_decomp=True)
    for overload in (AttentionMX.overload, DecodingAttention.overload):
        lowering.make_fallback(overload, warn=False, override_decomp=True)
    for operator, lowered in _prepared_calls().items():
        lowering.register_lowering(operator.overload, type_promotion_kind=None)(_prepared(operator, lowered))


def _prepared_calls() -> dict[type[Operator[Any]], Callable[..., Any]]:
    """Return operator -> its lowering to a prepared call, which returns None where the operator stays a call."""
    from pt2mx.kernels.inductor import prepared

    return {
        LinearMX: prepared.linear_mx,
        ActivationFakeQuantize: prepared.activation_fake_quantize_mx,
        AttentionMX: prepared.attention_mx,
        DecodingAttention: prepared.decoding_attention,
    }


def _prepared(cls: type[Operator[Any]], lowered: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import lowering

    call_operator = lowering.fallback_handler(cls.overload, add_to_fallback_set=False)
    lower = cls.function(lowered)

    def run(*args: Any) -> Any:
        result = lower(*args)
        return call_operator(*args) if result is None else result

    return run
