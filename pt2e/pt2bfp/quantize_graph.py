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
from pt2mx.pt2e import convert
from pt2mx.pt2e.flow.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.pt2bfp.quantizer import BFPQuantizer
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def convert_pt2e(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:
    """Convert a prepared model, after pt2-bfp's function of this name.

    Args:
        model: as `pt2mx.convert_pt2e` takes it.
        use_reference_representation: whether to write quantization and dequantization in aten operators, which give
            the same bits, instead of pt2mx's operators.
        fold_quantize: as in `pt2mx.convert_pt2e`.

    Returns:
        The converted model.

    Raises:
        MXError: for another model or argument.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> spec = pt2bfp.BFPQuantizationSpec("BFP[8|8]{64}(SN)")
        >>> quantizer = pt2bfp.BFPQuantizer().set_global(pt2bfp.BFPQuantizationConfig(spec, None, spec, None))
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> prepared = pt2bfp.prepare_pt2e(exported, quantizer)
        >>> reference = pt2bfp.convert_pt2e(prepared, use_reference_representation=True)
        >>> any("pt2mx" in str(node.target) for node in reference.graph.nodes)
        False
        >>> torch.equal(reference(x), pt2bfp.convert_pt2e(prepared)(x))
        True
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
    assert isinstance(reference, GraphModule)
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
    model: nn.Module,
    qconfig_mapping: MXQuantizer | Mapping[str, object],
    example_inputs: tuple[Any, ...],
    prepare_custom_config: None = None,
    _equalization_config: None = None,
    backend_config: object = None,
) -> GraphModule:
    """Insert observers for post-training quantization, after torch.ao's function of this name, which pt2-bfp has.

    The function exports the model and calls `prepare_pt2e`. The mapping selects modules by their names and types in the
    model, and operators. A graph from `torch.fx.symbolic_trace` has the same module names.

    Args:
        model: a module in evaluation mode, or a graph from `torch.fx.symbolic_trace`. It does not change, and the
            prepared model shares its parameters.
        qconfig_mapping: a `QConfigMapping`, or a dictionary as torch.ao takes it: `{"": qconfig, "object_type": [(type,
            qconfig), ...], "module_name": [...], "module_name_regex": [...]}`.
        example_inputs: the model's positional inputs. Their sizes become dynamic if the model allows it.
        prepare_custom_config, _equalization_config: None.
        backend_config: without effect, since pt2mx quantizes the same operators on all devices.

    Returns:
        The prepared model, for calibration and `convert_fx`.

    Raises:
        MXError: for another model or mapping, inputs that the model does not accept, and custom configs.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).eval()
        >>> traced = torch.fx.symbolic_trace(model)
        >>> qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> mapping = pt2bfp.QConfigMapping().set_global(qconfig).set_module_name("1", None)
        >>> prepared = pt2bfp.prepare_fx(traced, mapping, (torch.ones(2, 64),))
        >>> y = prepared(torch.ones(5, 64))
        >>> sorted(name for name, _ in pt2bfp.convert_fx(prepared).named_buffers())
        ['0.weight_data', '0.weight_scale']
    """
    _check_none(prepare_custom_config, _equalization_config)
    return prepare_pt2e(_exported(model, example_inputs), _quantizer(qconfig_mapping))


def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: MXQuantizer | Mapping[str, object],
    example_inputs: tuple[Any, ...],
    prepare_custom_config: None = None,
    backend_config: object = None,
) -> GraphModule:
    """Insert fake quantization for training, after torch.ao's function of this name.

    Args:
        model: a module in training or evaluation mode, as in the training, or a graph from `torch.fx.symbolic_trace`.
        qconfig_mapping, example_inputs, prepare_custom_config, backend_config: as in `prepare_fx`.

    Returns:
        The prepared model, to be trained like any module; `convert_fx` converts it.

    Raises:
        MXError: as `prepare_fx`.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> qat = pt2bfp.prepare_qat_fx(torch.nn.Linear(64, 8), {"": qconfig}, (torch.ones(2, 64),))
        >>> qat(torch.ones(2, 64)).sum().backward()
        >>> qat.weight.grad.shape
        torch.Size([8, 64])
    """
    _check_none(prepare_custom_config)
    return prepare_qat_pt2e(_exported(model, example_inputs), _quantizer(qconfig_mapping))


def convert_fx(
    graph_module: GraphModule,
    convert_custom_config: None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: None = None,
    backend_config: object = None,
) -> GraphModule:
    """Convert a prepared model, after torch.ao's function of this name.

    Args:
        graph_module: the result of `prepare_fx` or `prepare_qat_fx`.
        convert_custom_config, qconfig_mapping: None; `prepare_fx` has chosen the tensors to quantize.
        _remove_qconfig, backend_config: without effect.

    Returns:
        The converted model, with codes and scales in buffers, as `pt2mx.convert_pt2e` returns it.

    Raises:
        MXError: for another model, a custom config or a mapping.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> prepared = pt2bfp.prepare_fx(torch.nn.Linear(64, 8).eval(), {"": qconfig}, (torch.ones(2, 64),))
        >>> y = prepared(torch.ones(2, 64))
        >>> pt2bfp.convert_fx(prepared).weight_data.shape
        torch.Size([8, 64])
    """
    _check_none(convert_custom_config, qconfig_mapping)
    return convert_pt2e(graph_module)


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
        graph = torch.export.export(model, inputs, dynamic_shapes=shapes).module()
    assert isinstance(graph, GraphModule)
    return graph


def _more_rows(x: Tensor) -> Tensor:
    """x: (1, ...) -> (2, ...); x itself if its first size is another."""
    return torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x


def _check_none(*customs: object) -> None:
    for custom in customs:
        if custom is not None:
            raise MXError(f"{custom!r} must be None: choose what is quantized by the qconfig_mapping of prepare_fx")
