"""`optimize`: weights of an exported model, rotated and rounded such that the model's outputs change little."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from tqdm import tqdm

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors
from pt2mx.pt2e.optimize.hessian_observer import MXHessianObserver
from pt2mx.pt2e.optimize.ranks import Rounded, add_up, least, share_out
from pt2mx.pt2e.optimize.report import REPORT_KEY, OptimizationReport
from pt2mx.pt2e.optimize.rotation import rotate_products
from pt2mx.pt2e.optimize.rounding import round_weight
from pt2mx.pt2e.optimize.sites import Site, set_weight, weight_sites
from pt2mx.pt2e.prepare import check_exported, to_annotate
from pt2mx.pt2e.torchao_pt2e import Quantizer


class Preset(NamedTuple):
    """The algorithms of a preset: GPTQ by the inputs of products, and products in rotated coordinates."""

    by_inputs: bool
    rotates: bool


PRESETS = {"fast": Preset(by_inputs=False, rotates=False), "balanced": Preset(by_inputs=True, rotates=True)}


def optimize(
    model: GraphModule,
    quantizer: Quantizer,
    batches: Iterable[object] = (),
    *,
    preset: str = "balanced",
    progress: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GraphModule:
    """Round the weights that a quantizer will quantize, so that quantizing them then changes nothing.

    `balanced` rounds the weights of linear layers, matrix products and convolutions by GPTQ (Frantar et al.,
    arXiv:2210.17323), with one pass over the batches; block scales are chosen beforehand by the scale mode "even".
    Inputs and weights of linear layers and matrix products are rotated within blocks of 32 (`torch.ops.pt2mx.hadamard`,
    after QuaRot, arXiv:2404.00456). Other weights, and all of them with `fast`, get the block scales of least squared
    error.

    Args:
        model: `torch.export.export(...).module()` of a model in evaluation mode. It stays as it is.
        quantizer: the `MXQuantizer` by which the result is going to be prepared.
        batches: inputs for calibration, each a tuple of positional or a dictionary of named arguments, or one tensor.
            `fast` takes none.
        preset: "fast" or "balanced".
        progress: True shows a bar with the name of each weight.
        group: the ranks of `torch.distributed` that calibrate together, `torch.distributed.group.WORLD` for all of
            them: each calls `optimize` with the same model and with batches of its own, and gets the same result.
            None: this process by itself.

    Returns:
        An exported graph of the same signature, for `prepare_pt2e` with this quantizer. Batch norms that prepare folds
        are folded. `optimization_report` says what became of each weight.

    Raises:
        MXError: as `prepare_pt2e`; for an unknown preset, and for `balanced` without batches.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 128).reshape(2, 64)
        >>> linear = torch.nn.Linear(64, 8).eval()
        >>> exported = torch.export.export(linear, (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only")
        >>> optimized = pt2mx.optimize(exported, quantizer, [(x,)])
        >>> def error(model):
        ...     converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, quantizer))
        ...     return (converted(x) - linear(x)).square().sum()
        >>> bool(error(optimized) < error(exported))
        True
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise MXError(f"unknown preset {preset!r}: {nearest(str(preset), list(PRESETS))}")
    if isinstance(batches, Tensor | dict):
        raise MXError(f"batches must be a list of batches, not one {type(batches).__name__}: pass [batch]")
    check_exported(model)
    if not isinstance(quantizer, Quantizer):
        raise MXError(f"expected an MXQuantizer, not {type(quantizer).__name__}")
    result = to_annotate(model)
    sites = weight_sites(result, quantizer)
    by_inputs, rotates = PRESETS[preset]
    if rotates:
        rotate_products(result, sites)
        sites = weight_sites(result, quantizer)
    if by_inputs:
        _observe(result, sites, batches, group)
    reports = []
    with tqdm(total=len(sites), disable=not progress, file=sys.stderr) as bar:

        def work(site: Site) -> Rounded:
            bar.set_postfix_str(site.name)
            found = round_weight(site, by_inputs)
            bar.update()
            return found

        for site, (value, report) in share_out(sites, work, group):
            reports.append(report)
            if value is not None:
                set_weight(result, site, value)
    result.graph.eliminate_dead_code()
    delete_unused_tensors(result)
    result.recompile()
    result.meta[REPORT_KEY] = OptimizationReport(tuple(reports))
    return result


def _observe(model: GraphModule, sites: list[Site], batches: Iterable[object], group: dist.ProcessGroup | None) -> None:
    """Run the batches through a copy of the graph that observes what the weights are multiplied with: what is read
    several times in one way by one observer."""
    observed = copy_sharing_tensors(model)
    nodes = {node.name: node for node in observed.graph.nodes}
    written = written_nodes(model.graph)
    shared: dict[tuple[object, ...], MXHessianObserver] = {}
    for site in sites:
        for reader in site.readers:
            if (product := reader.product) is None:
                continue
            line = site.value.shape[product.layout.axis]
            # what is written between two readers is not the same for both
            apart = reader.node if product.source in written else None
            key = (product.source, product.layout.rows, line, reader.spec.block_size, apart)
            if key not in shared:
                shared[key] = MXHessianObserver(product.layout.rows, line, reader.spec.block_size)
                name = f"hessian_{len(shared)}"
                observed.add_submodule(name, shared[key])
                with observed.graph.inserting_before(nodes[reader.node.name]):
                    observed.graph.call_module(name, (nodes[product.source.name],))
            site.inputs.append((product.layout, shared[key]))
    observed.recompile()
    count = 0
    with torch.no_grad():
        for batch in batches:
            count += 1
            if isinstance(batch, dict):
                observed(**batch)
            else:
                observed(*(batch if isinstance(batch, tuple | list) else (batch,)))
    if not least(count, group):
        raise MXError("batches is empty: give batches of inputs, or preset='fast', which takes none")
    if sites:
        add_up(shared.values(), sites[0].value.device, group)
