"""`convert_pt2e` with pt2-bfp's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.portable import make_portable
from pt2mx.pt2e import convert


def convert_pt2e(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:
    """Convert a prepared model, after pt2-bfp's function of this name.

    Args:
        model: as `pt2mx.convert_pt2e` takes it.
        use_reference_representation: whether quantization and dequantization are written out in aten operators, which
            give the same bits; otherwise they are pt2mx's operators.
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
    return _written_out(converted) if use_reference_representation else converted


def _written_out(model: GraphModule) -> GraphModule:
    """A converted model in aten operators, with the dimensions that were dynamic in its export."""
    values = [node.meta.get("val") for node in model.graph.find_nodes(op="placeholder")]
    args, kwargs = pytree.tree_unflatten([_example(value) for value in values], model._in_spec)
    shapes = pytree.tree_unflatten([_dynamic(value) for value in values], model._in_spec)
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()))
        written = make_portable(program).module()
    assert isinstance(written, GraphModule)
    written.meta.update(model.meta)
    return written


def _example(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]  # those of the export
    return torch.zeros(sizes, dtype=value.dtype, device=value.device)


def _dynamic(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    auto = torch.export.Dim.AUTO
    return {i: auto for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
