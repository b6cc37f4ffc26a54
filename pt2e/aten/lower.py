"""`lower_to_aten`: write a converted program in core ATen operators and torch's own dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node

from pt2mx import ops
from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import GroupedLinearMX, is_ours, operator_of
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.passes.accumulate import refuse_accumulators
from pt2mx.fx.passes.packed_operands import MATMULS
from pt2mx.fx.passes.weight_layout import make_weights_k_major
from pt2mx.fx.portable import mark_portable, without_bit_casts
from pt2mx.fx.share_tables import share_tables
from pt2mx.fx.shifts import SHIFTS
from pt2mx.fx.targets.aten import use_native_dtypes, use_scaled_mm
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.linear import matmul_of_each
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.export_again import check_converted, export_again

aten = torch.ops.aten
_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
#: (`matmul`, `weights`) -> the passes that write matmuls and weights
_PASSES: dict[tuple[str, str], tuple[GraphPass, ...]] = {
    ("dequantize", "native"): (use_native_dtypes,),
    ("dequantize", "bytes"): (),
    ("scaled_mm", "native"): (make_weights_k_major, use_scaled_mm, use_native_dtypes),
}
#: operators that a converted model calls; a lowered one calls others
_CONVERTED = (ops.quantize_mx, ops.dequantize_mx, ops.fake_quantize_mx, ops.tensor_scale_mx, hadamard)


def lower_to_aten(
    program: ExportedProgram, *, matmul: str = "dequantize", core: bool = True, weights: str = "native"
) -> ExportedProgram:
    """Write a converted program in core ATen operators and torch's own dtypes.

    The program loads where only torch is installed, and takes the shapes that `program` takes. Weights are codes and
    scales: FP8 in `float8_e4m3fn` and `float8_e5m2`, INT8 in `int8`, FP4 and FP6 packed in `uint8`, scales in
    `float8_e8m0fnu` and `float8_e4m3fn`.

    Args:
        program: `torch.export.export(converted, ...)`; it does not change.
        matmul: "dequantize": every operator computes with dequantized tensors. "scaled_mm": linear layers whose weight
            and activation are both MXFP8 or both MXFP4 become `aten._scaled_mm`, those of NVFP4 `aten._scaled_mm_v2`.
        core: True decomposes the model's operators too, by torch's own decompositions into core ATen operators. Some
            of these, as of attention, compute other last bits. False leaves the model's operators.
        weights: "native": in the dtypes above. "bytes": codes and scales stay `uint8`, and the graph looks their values
            up, for compilers that lack one of these dtypes. Scaled matmuls take native ones.

    Returns:
        The program. With `matmul="dequantize"` and `core=False` it gives the bits of the converted model in eager mode;
        with `core=True` those of torch's decompositions, `program.run_decompositions()`; with `weights="bytes"` batch
        norms that no convolution absorbs are decomposed too, into steps that round elsewhere.

    Raises:
        MXError: for another object, for a program that is not one of a converted model, for an unknown `matmul` or
            `weights`, for scaled matmuls with bytes, and for a custom operator of the model (`core=True`).

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp8")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> lowered = pt2mx.lower_to_aten(torch.export.export(converted, (x,)))
        >>> lowered.state_dict["weight_data"].dtype, lowered.state_dict["weight_scale"].dtype
        (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        >>> torch.equal(lowered.module()(x), converted(x))
        True
    """
    for position, (name, value) in enumerate({"matmul": matmul, "weights": weights}.items()):
        known = {options[position] for options in _PASSES}
        if not isinstance(value, str) or value not in known:
            raise MXError(f"unknown {name}={value!r}: {nearest(value, sorted(known))}")
    if (matmul, weights) not in _PASSES:
        raise MXError(f"matmul={matmul!r} takes weights='native': torch's scaled matmuls have no codes in bytes")
    check_converted(program)
    refuse_accumulators(program.graph_module, "programs of aten operators")
    for node in _calls(program):
        if is_ours(node) and node.target not in _CONVERTED:
            raise MXError(
                f"{node.target} of {module_name(node) or node.name!r} is an operator of a lowered model: pass "
                "torch.export.export of what convert_pt2e returned"
            )
    again = export_again(program, _PASSES[matmul, weights])
    with user_errors("decompose the program"):
        core_ones = {**core_decompositions(), **_experts(again), **_OF_WEIGHTS.get(weights, {})}
        others: dict[Any, Any] = core_ones if core else {}
        lowered = _without_assertions(share_tables(without_bit_casts(again, others | SHIFTS | _FOR_TORCH_MLIR)))
    for node in _calls(lowered):
        if operator_of(node).namespace != "aten" and (core or is_ours(node)):
            raise MXError(
                f"{node.target} of {module_name(node) or node.name!r} has no form in core ATen operators: leave the "
                "model's operators (core=False), or write the module in ATen operators"
            )
    mark_portable(lowered)
    return lowered


def core_decompositions() -> dict[Any, Any]:
    """Return torch's decompositions into core operators; attention and batch norms keep the CPU kernels' memory order.

    Torch's (2.13) give another order, of which a `view` fails, as in GPT-2 and PatchTST.
    """
    table: dict[Any, Any] = default_decompositions().materialize()
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    decompose = table[attention]

    def in_order(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        y, logsumexp = decompose(*args, **kwargs)  # (B, H, L, E)
        return y.transpose(1, 2).contiguous().transpose(1, 2), logsumexp

    return {**table, attention: in_order, _BATCH_NORM: _batch_norm_in_order}


def _batch_norm_in_order(x: Tensor, *args: Any) -> Any:
    return NotImplemented if x.dim() != 3 or x.is_contiguous() else _BATCH_NORM(x.contiguous(), *args)


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    if not any(index is not None and index.dtype == torch.int32 for index in indices):
        return NotImplemented
    return aten.index.Tensor(x, [i.long() if i is not None and i.dtype == torch.int32 else i for i in indices])


def _with_tensor(bitwise: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, n: bitwise(x, torch.full((), n, dtype=torch.result_type(x, n), device=x.device))


def _squeeze(x: Tensor, dims: list[int]) -> Tensor:
    if not x.dim() or not all(isinstance(x.shape[dim], int) for dim in dims):
        return NotImplemented
    for dim in sorted((dim % x.dim() for dim in dims if x.shape[dim] == 1), reverse=True):
        x = x.select(dim, 0)
    return x


#: calls that torch-mlir refuses (IREE 3.13) -> those that it takes, also in the model
_FOR_TORCH_MLIR: dict[Any, Callable[..., Tensor]] = {
    aten.index.Tensor: _index,
    aten.bitwise_or.Scalar: _with_tensor(torch.bitwise_or),
    aten.bitwise_xor.Scalar: _with_tensor(torch.bitwise_xor),
    aten.squeeze.dims: _squeeze,
}


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.rsqrt(var + eps) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    scale, shift = (tensor.view(-1, *[1] * (x.dim() - 2)) for tensor in (scale, shift))
    return (x * scale + shift).to(x.dtype), mean.new_zeros(0), mean.new_zeros(0)


#: `weights` -> decompositions of core operators, which compilers for such weights refuse (IREE 3.13)
_OF_WEIGHTS: dict[str, dict[Any, Callable[..., Any]]] = {"bytes": {_BATCH_NORM: _batch_norm}}


def _without_assertions(program: ExportedProgram) -> ExportedProgram:
    """Erase the assertions that casts leave: the dtypes of a graph without other inputs cannot change."""
    for model in graph_modules(program.graph_module):
        for node in model.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
            model.graph.erase_node(node)
        model.recompile()
    return program


def _experts(program: ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """Return the matmuls of experts that a program calls, which torch does not decompose, and how they decompose."""
    named = {node.target: MATMULS.get(str(node.target)) for node in _calls(program)}
    return {call: _matmul_of_each for call, matmul in named.items() if matmul and matmul.packed is GroupedLinearMX}


def _matmul_of_each(x: Tensor, weight: Tensor, offs: Tensor | None = None, *others: Any) -> Tensor:
    if offs is None or any(others) or (x.dim(), weight.dim()) != (2, 3):
        return NotImplemented
    return matmul_of_each(x, weight, offs)


def _calls(program: ExportedProgram) -> list[Node]:
    """Return the nodes of a program and its subgraphs that call an operator."""
    graphs = graph_modules(program.graph_module)
    return [node for graph in graphs for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
