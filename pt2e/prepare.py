"""`prepare_pt2e` and `prepare_qat_pt2e`: torchao's, with what they miss for MX."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.fx import GraphModule

from pt2mx import ops
from pt2mx.checks import operator_modes
from pt2mx.errors import MXError
from pt2mx.fx.batch_norm import keep_shared_batch_norms
from pt2mx.fx.constants import constant_nodes
from pt2mx.fx.copy import copy_sharing_tensors
from pt2mx.pt2e import machinery
from pt2mx.pt2e.observer import MXFakeQuantize, MXObserver


def prepare_pt2e(model: GraphModule, quantizer: machinery.Quantizer) -> GraphModule:
    """Insert observers for post-training quantization.

    Args:
        model: `torch.export.export(...).module()` of an evaluated model. Its graph stays as it is; the prepared model
            shares its parameters.
        quantizer: an `MXQuantizer`, or torchao's `ComposableQuantizer` with one in it.

    Returns:
        The prepared model. It computes in high precision and collects statistics; `enable_fake_quant(model)` lets it
        compute as the converted model will.

    Raises:
        MXError: where `model` is no exported graph, is prepared or converted already, or spans several devices.
    """
    prepared = _prepare(model, quantizer, machinery.prepare_pt2e)
    constants = constant_nodes(prepared.graph)
    for node in prepared.graph.find_nodes(op="call_module"):
        observer = prepared.get_submodule(node.target)
        if isinstance(observer, MXObserver):
            observer.observe_once = node.args[0] in constants
    return prepared


def prepare_qat_pt2e(model: GraphModule, quantizer: machinery.Quantizer) -> GraphModule:
    """Insert fake quantization with a straight-through gradient, for training.

    Arguments and errors are those of `prepare_pt2e`.
    """
    prepared = _prepare(model, quantizer, machinery.prepare_qat_pt2e)
    _observers_to_fake_quantize(prepared)
    return prepared


def _prepare(model: GraphModule, quantizer: machinery.Quantizer, prepare: Callable) -> GraphModule:
    _check_exported(model)
    if not isinstance(quantizer, machinery.Quantizer):
        raise MXError(f"expected an MXQuantizer, not {type(quantizer).__name__}")
    model = copy_sharing_tensors(model)
    model.graph.eliminate_dead_code()
    keep_shared_batch_norms(model)
    try:
        prepared = prepare(model, quantizer)
    finally:
        machinery.forget_models()
    for node in prepared.graph.find_nodes(op="call_module"):
        if isinstance(prepared.get_submodule(node.target), MXObserver):
            # kept here: torchao's switch to eval replaces operators, with shapes of its own examples in their meta
            node.meta["val"] = node.args[0].meta.get("val")
    return prepared


def _check_exported(model: object) -> None:
    if isinstance(model, torch.export.ExportedProgram):
        raise MXError("expected a graph module, not an ExportedProgram: pass exported_program.module()")
    if machinery.is_prepared(model):
        raise MXError("the model is prepared already: calibrate or train it, then call convert_pt2e")
    if not isinstance(model, GraphModule) or not _is_exported(model):
        raise MXError(
            f"expected an exported graph, not {type(model).__name__}: "
            "pass torch.export.export(model, example_inputs).module()"
        )
    if any(node.target is ops.dequantize_mx for node in model.graph.nodes):
        raise MXError("the model is converted already: prepare the exported float model instead")
    devices = sorted({str(t.device) for t in [*model.parameters(), *model.buffers()]})
    if len(devices) > 1:
        raise MXError(
            f"the model spans the devices {', '.join(devices)}: move it to one device, or export and quantize the part "
            "on each device by itself"
        )


def _is_exported(model: GraphModule) -> bool:
    """Exported graphs call operators; traced ones (torch.fx.symbolic_trace) call modules, methods and functions."""
    calls = [n for n in model.graph.nodes if n.op.startswith("call_") and n.target != "_guards_fn"]
    operators = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    functions = [n for n in calls if n.op == "call_function"]
    return calls == functions and (not calls or any(isinstance(n.target, operators) for n in functions))


def _observers_to_fake_quantize(model: nn.Module) -> None:
    """QAT needs no flag in the config: every `MXObserver` that the annotations asked for becomes an
    `MXFakeQuantize`. One observer may stand under several names."""
    replacements: dict[MXObserver, MXFakeQuantize] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, MXObserver) and not isinstance(module, MXFakeQuantize):
            if module not in replacements:
                device = module.values.device
                replacements[module] = MXFakeQuantize(("mx", *operator_modes(module.spec))).to(device)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, replacements[module])
