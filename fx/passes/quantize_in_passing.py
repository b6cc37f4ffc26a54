"""Activations are quantized by calls, in the kernel that computes them: a residual sum and a layer norm, GELU, SiLU,
ReLU, or nothing. Inductor's code for the same takes two to five times as long on the CPU, and half as long again on a
GPU."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.formats import ELEMENTS
from pt2mx.fx.graph.activations import NAMES, activation_before, call_before, norm_before
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import FakeQuantize, RotatedFakeQuantize, node_arg, shape_of, value_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.fx.graph.views import is_view
from pt2mx.kernels.constants import supports_bf16x2
from pt2mx.kernels.cpu.build import is_available
from pt2mx.kernels.select import runs_triton
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.bfloat16_products import attention_bfloat16, matmul_bfloat16
from pt2mx.ops.fp8_rows import mm_fp8_rows
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.memory_format import contiguous_order, order_in_memory
from pt2mx.ops.quantized_activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: values from which a call, which takes 25 us more, is faster than a part of another kernel
_LEAST_VALUES = 1 << 16
#: what Inductor does not generate on a GPU
_CALLS = (
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default,
    aten.scaled_dot_product_attention.default, linear_mx, mm_fp8_rows, attention_mx, matmul_bfloat16,
    attention_bfloat16,
)  # fmt: skip


@graph_pass((FakeQuantize, RotatedFakeQuantize))
def quantize_in_passing(model: GraphModule) -> None:
    """Replace `fake_quantize_mx` along the last dimension of a tensor, and `rotated_fake_quantize_mx` without a
    rotation, by `layer_norm_fake_quantize_mx` or `activation_fake_quantize_mx`, with the norm or the activation before
    it. Small tensors, random roundings, clipped gradients, elements of more than 8 bits and what the machine has no
    kernels for keep theirs; on a GPU also what Inductor computes. What the graph writes is read where it was."""
    written = written_nodes(model.graph)
    for x in list(model.graph.nodes):
        of = _quantization(x)
        if of is None:
            continue
        modes = of.element, of.block_size, of.scale_mode, of.rounding, getattr(of, "target_dtype", None)
        norm = norm_before(of.x, written)
        activation, source = activation_before(of.x, written)
        if norm is not None:
            call = call_before(norm.node, layer_norm_fake_quantize_mx, *norm[1:], *modes)
            normed, quantized = (call_before(norm.node, operator.getitem, call, i) for i in range(2))
            normed.meta.update(norm.node.meta)
            norm.node.replace_all_uses_with(normed)
            erase_unused(norm.node)
        elif activation != "none" or isinstance(of, FakeQuantize):
            quantized = call_before(x, activation_fake_quantize_mx, source, activation, *modes)
        else:
            continue  # a call already
        quantized.meta.update({key: value for key, value in x.meta.items() if key != "val"})
        x.replace_all_uses_with(quantized)
        erase_unused(x)


def is_quantized_in_passing(x: Node) -> bool:
    """True of a `fake_quantize_mx` that becomes a call here."""
    return _quantization(x) is not None


def _quantization(x: Node) -> FakeQuantize | RotatedFakeQuantize | None:
    """The quantization that becomes a call; None of another node, and of one that stays."""
    of = FakeQuantize.of(x) or RotatedFakeQuantize.of(x)
    value, shape = (None, None) if of is None else (value_of(of.x), shape_of(of.x))
    if of is None or value is None or not shape or ELEMENTS[of.element].is_wide:
        return None
    if order_in_memory(value) != contiguous_order(value):  # which a quantization keeps, and a call does not
        return None
    if isinstance(of, RotatedFakeQuantize):
        stays = of.size > 1
    else:
        stays = of.axis not in (-1, len(shape) - 1) or of.ste != "identity" or ROUNDINGS[of.rounding].random
    known = [n for n in shape if isinstance(n, int)]
    small = len(known) == len(shape) and math.prod(known) < _LEAST_VALUES
    serves = _SERVES.get(value.device.type)
    return of if serves and not stays and not small and serves(of, value) else None


def _serves_cpu(of: FakeQuantize | RotatedFakeQuantize, value: Tensor) -> bool:
    return is_available()


def _serves_gpu(of: FakeQuantize | RotatedFakeQuantize, value: Tensor) -> bool:
    """True if there is an activation or a norm that a kernel can compute, or a call, into which Inductor fuses
    nothing. What it computes itself it quantizes there."""
    spec = MXSpec(of.element, of.block_size, -1, of.scale_mode, of.rounding)
    if not supports_bf16x2(spec, value.shape[-1], value.dtype) or not runs_triton(value.device):
        return False
    if of.x.target in NAMES or norm_before(of.x, set()) is not None:
        return True
    source = of.x
    while is_view(source):
        source = node_arg(source)
    return source.target in _CALLS


_SERVES = {"cpu": _serves_cpu, "cuda": _serves_gpu}
