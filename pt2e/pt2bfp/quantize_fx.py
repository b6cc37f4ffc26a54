"""`prepare_fx` and `convert_fx`: the flow of exported graphs for eager models and symbolically traced ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.pt2bfp.quantize_pt2e import convert_pt2e
from pt2mx.pt2e.pt2bfp.quantizer import BFPQuantizer
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def prepare_fx(
    model: nn.Module,
    qconfig_mapping: MXQuantizer | Mapping[str, object],
    example_inputs: tuple[Any, ...],
    prepare_custom_config: None = None,
    _equalization_config: None = None,
    backend_config: object = None,
) -> GraphModule:
    """Insert observers for post-training quantization, after torch.ao's function of this name, which pt2-bfp has.

    The model is exported and prepared as `prepare_pt2e` does it. Names of modules, their types and operators in the
    mapping mean those of the model; a module that `torch.fx.symbolic_trace` traced is called by its node
    (`call_module`), and has its name there.

    Args:
        model: a module in evaluation mode, or what `torch.fx.symbolic_trace` returned. It stays unchanged, and the
            prepared model shares its parameters.
        qconfig_mapping: a `QConfigMapping`, or a dictionary of torch.ao's form: `{"": qconfig, "object_type": [(type,
            qconfig), ...], "module_name": [...], "module_name_regex": [...]}`.
        example_inputs: the model's positional inputs. Their sizes become dynamic where the model allows it.
        prepare_custom_config, _equalization_config: None.
        backend_config: without effect: the operators that pt2mx quantizes are the same on all devices.

    Returns:
        The prepared model, for calibration and `convert_fx`.

    Raises:
        MXError: for another model or mapping, inputs that it does not take, and custom configs.

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
        model: a module in the mode in which it is to be trained, or what `torch.fx.symbolic_trace` returned.
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
        graph_module: what `prepare_fx` or `prepare_qat_fx` returned.
        convert_custom_config, qconfig_mapping: None; what is quantized was chosen by `prepare_fx`.
        _remove_qconfig, backend_config: without effect.

    Returns:
        The converted model: codes and scales in buffers, for all that takes what `pt2mx.convert_pt2e` returns.

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
    """The exported graph of a model whose sizes are dynamic where it allows that."""
    if not isinstance(model, nn.Module):
        raise MXError(f"expected a module or what torch.fx.symbolic_trace returned, not {type(model).__name__}")
    if not isinstance(inputs, tuple | list):
        raise MXError(f"example_inputs must be a tuple of the model's inputs, not {type(inputs).__name__}")
    several = pytree.tree_map_only(Tensor, _more_rows, tuple(inputs))
    try:
        return _export(model, several)  # export takes a size of 1 for a constant
    except Exception:
        pass  # a model of one row alone
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
    """x: (1, ...) -> (2, ...); of another first size itself."""
    return torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x


def _check_none(*customs: object) -> None:
    for custom in customs:
        if custom is not None:
            raise MXError(f"{custom!r} must be None: choose what is quantized by the qconfig_mapping of prepare_fx")
