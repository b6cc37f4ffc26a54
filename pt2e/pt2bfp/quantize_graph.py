"""Quantize exported graphs with pt2-bfp's arguments: `convert_pt2e`, `prepare_fx`, `prepare_qat_fx`, `convert_fx`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.portable import make_portable
from pt2mx.pt2e.flow import convert
from pt2mx.pt2e.flow.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.pt2bfp.quantizer import BFPQuantizer
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def convert_pt2e(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:
    """Convert a prepared model, after pt2-bfp's function of this name. `use_reference_representation` writes
    quantization in aten operators, which give the same bits, instead of pt2mx's operators.

    Raises:
        MXError: as `pt2mx.convert_pt2e`, and for another argument.
    """
    if not isinstance(use_reference_representation, bool):
        raise MXError(f"use_reference_representation={use_reference_representation!r} must be True or False")
    converted = convert.convert_pt2e(model, fold_quantize=fold_quantize)
    return _reference_representation(converted) if use_reference_representation else converted


def _reference_representation(model: GraphModule) -> GraphModule:
    """Return a converted model in aten operators. Sizes that were dynamic in its export stay dynamic."""
    values = [node.meta.get("val") for node in model.graph.find_nodes(op="placeholder")]
    args, kwargs = pytree.tree_unflatten([_example(value) for value in values], model._in_spec)
    shapes = pytree.tree_unflatten([_dynamic(value) for value in values], model._in_spec)
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()))
        reference = make_portable(program).module()
    reference.meta.update(model.meta)
    return reference


def _example(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]  # the example's
    return torch.zeros(sizes, dtype=value.dtype, device=value.device)


def _dynamic(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    auto = torch.export.Dim.AUTO
    return {i: auto for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}


def prepare_fx(
    model: nn.Module, qconfig_mapping: MXQuantizer | Mapping[str, object], example_inputs: tuple[Any, ...]
) -> GraphModule:
    """Insert observers for post-training quantization, after torch.ao's function of this name, which pt2-bfp has.

    The function exports the model, or its graph from `torch.fx.symbolic_trace`, and calls `prepare_pt2e`. The mapping,
    a `QConfigMapping` or a dictionary as torch.ao takes it, selects modules by their names and types in the model, and
    operators. Sizes of the inputs become dynamic if the model allows it.

    Raises:
        MXError: for another model or mapping, and inputs that the model does not accept.
    """
    return prepare_pt2e(_exported(model, example_inputs), _quantizer(qconfig_mapping))


def prepare_qat_fx(
    model: nn.Module, qconfig_mapping: MXQuantizer | Mapping[str, object], example_inputs: tuple[Any, ...]
) -> GraphModule:
    """Insert fake quantization for training, after torch.ao's function of this name, as `prepare_fx` inserts observers.
    The model is in training or evaluation mode, as in the training."""
    return prepare_qat_pt2e(_exported(model, example_inputs), _quantizer(qconfig_mapping))


convert_fx = convert_pt2e


def _quantizer(mapping: MXQuantizer | Mapping[str, object]) -> MXQuantizer:
    return mapping if isinstance(mapping, MXQuantizer) else BFPQuantizer.from_dict(mapping)


def _exported(model: nn.Module, inputs: object) -> GraphModule:
    """Return the exported graph of a model. Its sizes are dynamic where the model allows it."""
    if not isinstance(model, nn.Module):
        raise MXError(f"expected a module or what torch.fx.symbolic_trace returned, not {type(model).__name__}")
    if not isinstance(inputs, tuple | list):
        raise MXError(f"example_inputs must be a tuple of the model's inputs, not {type(inputs).__name__}")
    several = pytree.tree_map_only(Tensor, _more_rows, tuple(inputs))
    try:
        return _export(model, several)  # with a size of 1, export would make it constant
    except Exception:
        pass  # the model takes one row only
    try:
        return _export(model, tuple(inputs))
    except Exception as error:
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MXError(f"torch.export cannot export the model for these inputs: {message}") from error


def _export(model: nn.Module, inputs: tuple[Any, ...]) -> GraphModule:
    auto = torch.export.Dim.AUTO
    shapes = pytree.tree_map(lambda x: [auto] * x.dim() if isinstance(x, Tensor) else None, inputs)
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes).module()


def _more_rows(x: Tensor) -> Tensor:
    """x: (1, ...) -> (2, ...); x itself if its first size is another."""
    return torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x
