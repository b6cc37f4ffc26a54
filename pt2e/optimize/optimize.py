"""`optimize`: transform and round the weights of an exported model so that its outputs change little."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from pt2mx.algorithms.block_scales import BlockScales
from pt2mx.algorithms.options import (
    GPTQ,
    PRESETS,
    Algorithm,
    LearnedRounding,
    Rotation,
    Smoothing,
    chosen_algorithms,
    folded_rotation,
    look_at_inputs,
)
from pt2mx.errors import MXError, nearest
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.constants import hoist_constants, merge_equal_operands
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors, generate_code
from pt2mx.pt2e.flow.anchors import check_sliceable
from pt2mx.pt2e.flow.prepare import check_exported, check_quantizer, to_annotate
from pt2mx.pt2e.observe.torchao_pt2e import Quantizer
from pt2mx.pt2e.optimize.calibrate import Calibration, observe, padding_mask_of
from pt2mx.pt2e.optimize.distributed import Rounded, share_work
from pt2mx.pt2e.optimize.fold_rotation import fold_rotations
from pt2mx.pt2e.optimize.in_order import round_in_order
from pt2mx.pt2e.optimize.learned_rounding import learn_rounding
from pt2mx.pt2e.optimize.report import REPORT_KEY, OptimizationReport, WeightReport
from pt2mx.pt2e.optimize.rotation import rotate_attention, rotate_matmuls
from pt2mx.pt2e.optimize.rounding import round_weight, rounding_errors
from pt2mx.pt2e.optimize.smoothing import smooth_matmuls
from pt2mx.pt2e.optimize.stored_codes import pack_weights, round_siblings
from pt2mx.pt2e.optimize.targets import WeightTarget, note_rounding, quantized_inputs, set_weight, weight_targets
from pt2mx.spec import MXSpec, parse


def optimize(
    model: GraphModule,
    quantizer: Quantizer,
    batches: Iterable[object] = (),
    *,
    preset: str | None = None,
    algorithms: Sequence[Algorithm] | None = None,
    anchor: object = None,
    padding_mask: str | None = None,
    progress: bool = False,
    in_place: bool = False,
    group: dist.ProcessGroup | None = None,
) -> GraphModule:
    """Round the weights that a quantizer will quantize onto the MX grid, so that quantizing them later is exact.

    Presets:

    - `fast` chooses block scales of least squared error, without inputs.
    - `imatrix` weights that error of each column by the mean square of its input, the "importance matrix" of llama.cpp.
    - `balanced` rounds the weights of linear layers, matmuls and convolutions by GPTQ, in one pass over the batches,
      and rotates the inputs and weights of linear layers and matmuls within blocks of 32. Other weights are rounded as
      by `fast`.
    - `best` also divides the channels of inputs below 8 bits by powers of two, rotates queries and keys, and learns the
      rounding of each repeated module.

    `pt2mx.algorithms` names the sources.

    Args:
        model: `torch.export.export(...).module()` of a model in evaluation mode. It is not changed, except `in_place`.
        quantizer: the `MXQuantizer` that will prepare the result.
        batches: calibration inputs, each a tuple of positional or a dictionary of named arguments, or one tensor.
            `fast` needs none.
        preset: "fast", "imatrix", "balanced" or "best"; None: the preset of the quantizer's recipe, or "balanced".
        algorithms: instead of a preset, a tuple of `Smoothing`, `Rotation`, `ScaleSearch`, `GPTQ` and
            `LearnedRounding` of `pt2mx.algorithms`, with their options.
        anchor: the format of the file from which `slice_program` makes weights in the quantizer's formats, as
            `pt2mx.parse` takes it, such as "mxint8". The weights are then values of that format which quantize to the
            rounded ones; prepare the result with a recipe of the anchor. None: no slices.
        padding_mask: the name of an input, (batch, sequence), that is zero at padding, in many models "attention_mask".
            Calibration of linear layers then ignores padding. None: it uses all rows.
        progress: True shows a bar with the name of each weight.
        in_place: True writes the new weights into the memory of the old ones, for models that fill the memory.
            Afterwards do not use `model`, or anything that shares its parameters, even if `optimize` fails.
        group: the ranks of `torch.distributed` that calibrate together, such as `torch.distributed.group.WORLD`. Each
            calls `optimize` with the same model and its own batches, and gets the same result. None: one process.

    Returns:
        An exported graph of the same signature, for `prepare_pt2e` with this quantizer. Weights in formats whose scales
        have a significand (NVFP4) are codes and scales in it, which QAT does not train. Batch norms that prepare folds
        are folded. `optimization_report` describes what was done to each weight.

    Raises:
        MXError: as in `prepare_pt2e`; for an unknown preset, algorithm or padding mask; for `GPTQ(correction=...)` and
            learned rounding beside an option that they exclude; if an algorithm needs inputs
            but there are no batches; for a model into whose weights `Rotation(online=False)` cannot be folded, or that
            computes something else with it on the first batch; and for an anchor that is narrower than a weight, has
            other blocks or scales, or meets learned rounding.

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
    chosen = _selected_algorithms(preset, algorithms, quantizer)
    learned = None
    for algorithm in chosen:
        if isinstance(algorithm, LearnedRounding):
            learned = algorithm
    if learned is not None and (in_place or group):
        raise MXError("learned rounding needs the float weights and all batches: give neither in_place nor group")
    correction = _correction(chosen)
    if correction is not None and (in_place or group or anchor is not None):
        raise MXError("GPTQ(correction=...) runs all batches together: give neither in_place, group nor anchor")
    anchor_spec = None if anchor is None else checked_anchor(anchor, chosen)
    if isinstance(batches, Tensor | dict) or not isinstance(batches, Iterable):
        raise MXError(f"batches must be a list of batches, not one {type(batches).__name__}: pass [batch]")
    check_exported(model)
    check_quantizer(quantizer)
    folded = folded_rotation(chosen)
    if folded is not None:
        others = iter(batches)
        first = list(islice(others, 1))
        model, batches = fold_rotations(model, folded, *first), chain(first, others)
    result = generate_code(to_annotate(model))
    weights = {tensor for _, tensor, role, _ in quantized_inputs(result, quantizer) if role == "weight"}
    targets = weight_targets(hoist_constants(result, weights), quantizer, in_place)
    if anchor_spec is not None:
        for target in targets:
            for consumer in target.consumers:
                check_sliceable(target.name, consumer.spec, anchor_spec)
    mask = None if padding_mask is None else padding_mask_of(result, padding_mask)
    kept = batches if learned is None and correction is None else list(batches)
    calibration = observe(result, targets, kept, mask, group) if look_at_inputs(chosen) else Calibration({}, {})
    targets = _transform(result, targets, quantizer, calibration, chosen)
    original = result if learned is None else copy_sharing_tensors(result)
    scales: dict[Node, BlockScales] = {}
    done: dict[Node, Rounded] = {}
    if correction is not None:

        def rounded(target: WeightTarget) -> Rounded:
            return round_weight(target, chosen)

        done = round_in_order(result, targets, quantizer, list(kept), mask, correction, rounded)
    reports = _round(result, targets, chosen, progress, group, scales, anchor_spec, done)
    round_siblings(result, targets, scales)
    if learned is not None:
        blocks = learn_rounding(result, original, quantizer, list(kept), learned, scales, progress)
        after = weight_targets(result, quantizer)
        names = set().union(*(block.weights for block in blocks))
        _report_learned(reports, targets, [target for target in after if target.name in names])
        round_siblings(result, after, scales)
    merge_equal_operands(result)
    if scales:
        pack_weights(result, weight_targets(result, quantizer), scales)
    for graph in graph_modules(result):
        graph.graph.eliminate_dead_code()
        graph.recompile()
    delete_unused_tensors(result)
    result.meta[REPORT_KEY] = OptimizationReport(tuple(reports))
    return result


def _transform(
    model: GraphModule,
    targets: list[WeightTarget],
    quantizer: Quantizer,
    calibration: Calibration,
    algorithms: Sequence[Algorithm],
) -> list[WeightTarget]:
    """Smooth and rotate the matmuls of `model`, and return its weights with the observers of their inputs."""
    smoothed: dict[Node, str] = {}
    in_place = any(target.in_place for target in targets)
    for algorithm in algorithms:
        if isinstance(algorithm, Smoothing):
            smoothed = smooth_matmuls(model, targets, calibration.inputs, algorithm)
            targets = weight_targets(model, quantizer, in_place)
        elif isinstance(algorithm, Rotation) and algorithm.online:
            rotate_matmuls(model, targets, calibration.inputs, algorithm)
            if algorithm.attention:
                rotate_attention(model, quantizer, algorithm)
            targets = weight_targets(model, quantizer, in_place)
    for target in targets:
        for consumer in target.consumers:
            if consumer.matmul is not None and consumer.node in calibration.inputs:
                target.inputs.append((consumer.matmul.view, calibration.inputs[consumer.node]))
            if consumer.node in calibration.rows:
                target.rows.append(calibration.rows[consumer.node])
        target.smoothed = smoothed.get(target.consumers[0].node, "")
    return targets


def _round(
    model: GraphModule,
    targets: list[WeightTarget],
    algorithms: Sequence[Algorithm],
    progress: bool,
    group: dist.ProcessGroup | None,
    scales: dict[Node, BlockScales],
    anchor: MXSpec | None,
    done: dict[Node, Rounded],
) -> list[WeightReport]:
    """Round the weights of `model` that are not `done`; each rank rounds its share.

    `scales` gets the scales that do not follow from the rounded weight, by its first consumer.
    """
    reports = []
    with tqdm(total=len(targets), disable=not progress, file=sys.stderr) as bar:

        def work(target: WeightTarget) -> Rounded:
            bar.set_postfix_str(target.name)
            rounded = done.get(target.node) or round_weight(target, algorithms, anchor)
            bar.update()
            return rounded

        for target, (value, known, report) in share_work(targets, work, group):
            reports.append(report)
            if value is not None:
                note_rounding(target, value)
                set_weight(model, target, value)
            if known is not None:
                scales[target.consumers[0].node] = known
    return reports


def _correction(algorithms: Sequence[Algorithm]) -> float | None:
    for algorithm in algorithms:
        if isinstance(algorithm, GPTQ):
            return algorithm.correction
    return None


def _report_learned(reports: list[WeightReport], targets: list[WeightTarget], learned: Sequence[WeightTarget]) -> None:
    """Update the reports and the noted noise of weights, which `targets` have as floats, whose rounding was learned."""
    changed = {target.consumers[0].node: target for target in learned}
    for i, target in enumerate(targets):
        learned_target, spec = changed.get(target.consumers[0].node), target.consumers[0].spec
        if learned_target is not None:
            value = learned_target.value.detach()
            note_rounding(learned_target, value, exact=target.value.detach())
            before = reports[i].algorithm
            algorithm = f"{before}, learned_rounding" if before else "learned_rounding"
            exact = fake_quantize_mx(value, spec) if spec.has_power_of_two_scale else value
            (after,) = rounding_errors(target, exact)
            reports[i] = replace(reports[i], algorithm=algorithm, after=after)


def checked_anchor(anchor: object, algorithms: Sequence[Algorithm]) -> MXSpec:
    """Return the format of an anchor; raise an MXError for an unknown one, and for algorithms that make no slices."""
    if any(isinstance(one, LearnedRounding) for one in algorithms):
        raise MXError("learned rounding makes no slices of an anchor: give preset='balanced' or 'fast', or no anchor")
    return parse(anchor)


def _selected_algorithms(preset: str | None, algorithms: object, quantizer: Quantizer) -> tuple[Algorithm, ...]:
    """Return the requested algorithms, by default the algorithms of the quantizer's recipe."""
    if preset is not None and algorithms is not None:
        raise MXError(f"preset={preset!r} and algorithms say the same: give one of them")
    if preset is not None and not isinstance(preset, str):
        raise MXError(f"unknown preset {preset!r}: {nearest(str(preset), list(PRESETS))}")
    if preset is not None:
        return chosen_algorithms(preset)
    if algorithms is not None:
        return chosen_algorithms(algorithms)
    return chosen_algorithms(getattr(quantizer, "algorithms", None) or "balanced")
