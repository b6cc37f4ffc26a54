"""`optimize`: weights of an exported model, rotated and rounded such that the model's outputs change little."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from pt2mx.algorithms.options import (
    PRESETS,
    Algorithm,
    LearnedRounding,
    Rotation,
    Smoothing,
    chosen_algorithms,
    look_at_inputs,
)
from pt2mx.errors import MXError, nearest
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.hoist_constants import hoist_constants, merge_equal_operands
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors
from pt2mx.pt2e.optimize.calibrate import Seen, observe, padding_mask_of
from pt2mx.pt2e.optimize.distributed import Rounded, share_out
from pt2mx.pt2e.optimize.learned_rounding import learn_rounding
from pt2mx.pt2e.optimize.report import REPORT_KEY, OptimizationReport, WeightReport
from pt2mx.pt2e.optimize.rotation import rotate_attention, rotate_products
from pt2mx.pt2e.optimize.rounding import round_weight, rounding_errors
from pt2mx.pt2e.optimize.smoothing import smooth_products
from pt2mx.pt2e.optimize.targets import Site, quantized_inputs, set_weight, weight_sites
from pt2mx.pt2e.prepare import check_exported, to_annotate
from pt2mx.pt2e.torchao_pt2e import Quantizer


def optimize(
    model: GraphModule,
    quantizer: Quantizer,
    batches: Iterable[object] = (),
    *,
    preset: str | None = None,
    algorithms: Sequence[Algorithm] | None = None,
    padding_mask: str | None = None,
    progress: bool = False,
    in_place: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GraphModule:
    """Round the weights that a quantizer will quantize, so that quantizing them then changes nothing.

    Presets: `fast` chooses block scales of least squared error and looks at no inputs. `balanced` rounds the weights of
    linear layers, matrix products and convolutions by GPTQ, with one pass over the batches, and rotates the inputs and
    weights of the first two within blocks of 32; other weights are rounded as by `fast`. `best` also divides the
    channels of inputs that are quantized below 8 bits by powers of two, rotates queries and keys, and trains the
    rounding of each repeated block. `pt2mx.algorithms` names the sources.

    Args:
        model: `torch.export.export(...).module()` of a model in evaluation mode. It stays as it is, but for `in_place`.
        quantizer: the `MXQuantizer` by which the result is going to be prepared.
        batches: inputs for calibration, each a tuple of positional or a dictionary of named arguments, or one tensor.
            `fast` takes none.
        preset: "fast", "balanced" or "best"; None: that of the quantizer's recipe, or "balanced".
        algorithms: in place of a preset, a tuple of `Smoothing`, `Rotation`, `ScaleSearch`, `GPTQ` and
            `LearnedRounding` of `pt2mx.algorithms`, with their options.
        padding_mask: the name of an input, (batch, sequence), that is zero where there is padding, "attention_mask" of
            many models: what linear layers see there is left out. None: all is seen.
        progress: True shows a bar with the name of each weight.
        in_place: True writes the new weights into the memory of the old ones, for models that fill the memory: `model`,
            and what shares its parameters, must not be used any more, nor if this fails.
        group: the ranks of `torch.distributed` that calibrate together, `torch.distributed.group.WORLD` for all of
            them: each calls `optimize` with the same model and with batches of its own, and gets the same result.
            None: this process by itself.

    Returns:
        An exported graph of the same signature, for `prepare_pt2e` with this quantizer. Batch norms that prepare folds
        are folded. `optimization_report` says what became of each weight.

    Raises:
        MXError: as `prepare_pt2e`; for an unknown preset, algorithm or padding mask, and where an algorithm that looks
            at inputs has no batches.

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
    chosen = _chosen(preset, algorithms, quantizer)
    if (in_place or group) and any(isinstance(one, LearnedRounding) for one in chosen):
        raise MXError("learned rounding needs the float weights and all batches: give neither in_place nor group")
    if isinstance(batches, Tensor | dict):
        raise MXError(f"batches must be a list of batches, not one {type(batches).__name__}: pass [batch]")
    check_exported(model)
    if not isinstance(quantizer, Quantizer):
        raise MXError(f"expected an MXQuantizer, not {type(quantizer).__name__}")
    result = to_annotate(model)
    weights = {tensor for _, tensor, role, _ in quantized_inputs(result, quantizer) if role == "weight"}
    sites = weight_sites(hoist_constants(result, weights), quantizer, in_place)
    mask = None if padding_mask is None else padding_mask_of(result, padding_mask)
    learned = next((one for one in chosen if isinstance(one, LearnedRounding)), None)
    batches = batches if learned is None else list(batches)
    seen = observe(result, sites, batches, mask, group) if look_at_inputs(chosen) else Seen({}, {})
    sites = _in_other_coordinates(result, sites, quantizer, seen, chosen)
    original = None if learned is None else copy_sharing_tensors(result)
    reports = _round(result, sites, chosen, progress, group)
    if learned is not None and original is not None:
        blocks = learn_rounding(
            result, original, quantizer, list(batches), steps=learned.steps, seed=learned.seed, progress=progress
        )
        _report_learned(reports, sites, {w for block in blocks for w in block.weights}, result, quantizer)
    merge_equal_operands(result)
    for graph in graph_modules(result):
        graph.graph.eliminate_dead_code()
        graph.recompile()
    delete_unused_tensors(result)
    result.meta[REPORT_KEY] = OptimizationReport(tuple(reports))
    return result


def _in_other_coordinates(
    model: GraphModule, sites: list[Site], quantizer: Quantizer, seen: Seen, algorithms: Sequence[Algorithm]
) -> list[Site]:
    """Smooth and rotate the products of `model`. Gives its weights, with what is known of their inputs."""
    smoothed: dict[Node, str] = {}
    in_place = any(site.in_place for site in sites)
    for one in algorithms:
        if isinstance(one, Smoothing):
            smoothed = smooth_products(model, sites, seen.inputs, one)
            sites = weight_sites(model, quantizer, in_place)
        elif isinstance(one, Rotation):
            rotate_products(model, sites, seen.inputs, one)
            if one.attention:
                rotate_attention(model, quantizer, one)
            sites = weight_sites(model, quantizer, in_place)
    for site in sites:
        inputs = [(r.product.layout, seen.inputs[r.node]) for r in site.readers if r.product and r.node in seen.inputs]
        site.inputs, site.smoothed = inputs, smoothed.get(site.readers[0].node, "")
        site.rows = [seen.rows[r.node] for r in site.readers if r.node in seen.rows]
    return sites


def _round(
    model: GraphModule,
    sites: list[Site],
    algorithms: Sequence[Algorithm],
    progress: bool,
    group: dist.ProcessGroup | None,
) -> list[WeightReport]:
    """Round the weights of `model`, each rank its share of them."""
    reports = []
    with tqdm(total=len(sites), disable=not progress, file=sys.stderr) as bar:

        def work(site: Site) -> Rounded:
            bar.set_postfix_str(site.name)
            found = round_weight(site, algorithms)
            bar.update()
            return found

        for site, (value, report) in share_out(sites, work, group):
            reports.append(report)
            if value is not None:
                set_weight(model, site, value)
    return reports


def _report_learned(
    reports: list[WeightReport], sites: list[Site], learned: set[str], result: GraphModule, quantizer: Quantizer
) -> None:
    """Say of the weights whose rounding was learned what their error is now."""
    now = {reader.node: site for site in weight_sites(result, quantizer) for reader in site.readers}
    for i, site in enumerate(sites):
        if (changed := now[site.readers[0].node]).name in learned:
            algorithm = ", ".join([*filter(None, [reports[i].algorithm]), "learned_rounding"])
            (after,) = rounding_errors(site, fake_quantize_mx(changed.value.detach(), site.readers[0].spec))
            reports[i] = replace(reports[i], algorithm=algorithm, after=after)


def _chosen(preset: str | None, algorithms: object, quantizer: Quantizer) -> tuple[Algorithm, ...]:
    """The algorithms that are asked for; without a word those of the quantizer's recipe."""
    if preset is not None and algorithms is not None:
        raise MXError(f"preset={preset!r} and algorithms say the same: give one of them")
    if preset is not None and not isinstance(preset, str):
        raise MXError(f"unknown preset {preset!r}: {nearest(str(preset), list(PRESETS))}")
    of_recipe = getattr(quantizer, "algorithms", None) or "balanced"
    return chosen_algorithms(next(one for one in (preset, algorithms, of_recipe) if one is not None))
