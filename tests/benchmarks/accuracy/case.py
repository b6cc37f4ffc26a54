"""A model, its calibration data and its metric; the rows that measure every model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import cosine_similarity
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, get_default_mx_quantization_config, parse
from pt2mx.algorithms import GPTQ, Rotation, ScaleSearch
from pt2mx.algorithms.options import PRESETS, Algorithm
from pt2mx.fx.graph.tensors import move_to_device
from pt2mx.pt2e.sensitivity.tensor_scales import calibrate_tensor_scales
from tests.benchmarks.measure import Row, timed
from tests.benchmarks.peak import forget_peak, peak

#: format -> elements of weights and of activations
FORMATS: dict[str, tuple[str, str | None]] = {
    "W4": ("mxfp4", None),
    "W4A8": ("mxfp4", "mxfp8"),
    "W4A4": ("mxfp4", "mxfp4"),
    "NVFP4 W4": ("nvfp4", None),
    "NVFP4 W4A4": ("nvfp4", "nvfp4"),
}
#: format of weights -> its scale modes for rounding to nearest; the presets use the last one
SCALE_MODES = {"mxfp4": ("floor", "rceil_v2", "even"), "nvfp4": ("nearest", "four_six")}
#: the row of a model that `distill` trained, starting from the result of `balanced`
DISTILLED = "distilled"


def _corrected(algorithms: tuple[Algorithm, ...]) -> tuple[Algorithm, ...]:
    """Return the algorithms with layers that make up for errors of the layers before them."""
    return tuple(replace(one, correction=0.25) if isinstance(one, GPTQ) else one for one in algorithms)


#: row of a decoder -> the algorithms whose result checkpoints hold: GPTQ and scale search without a rotation, and with
#: one that the weights hold
_FOLDED = Rotation(online=False), ScaleSearch(), GPTQ()
OF_CHECKPOINTS = {"unrotated": (ScaleSearch(), GPTQ()), "folded": _FOLDED, "folded, corrected": _corrected(_FOLDED)}
#: the same for presets, which rotate at run time
OF_PROGRAMS = {f"{name}, corrected": _corrected(PRESETS[name]) for name in ("balanced", "best")}
ALGORITHMS = {**OF_CHECKPOINTS, **OF_PROGRAMS}

Forward = Callable[..., Tensor]


class Figures(NamedTuple):
    """The loss of quantization, and the figures of a model."""

    loss: float
    shown: dict[str, str]


@dataclass(frozen=True)
class Case:
    """A model to measure.

    Args:
        model: exported.
        batches: the calibration batches.
        quantizer: format, scale mode of FP4 -> the quantizer.
        judge: a model that is called as `model` -> its figures.
        formats: the formats to measure.
        padding_mask: as `optimize` takes it.
        lessons: a number of examples -> the batches for distillation; None: no distillation.
        examples, rate, distill_loss: of distillation.
    """

    model: GraphModule
    batches: Sequence[object]
    quantizer: Callable[[str, str], MXQuantizer]
    judge: Callable[[Forward], Figures]
    formats: Sequence[str] = tuple(FORMATS)
    padding_mask: str | None = None
    lessons: Callable[[int], Sequence[object]] | None = None
    examples: int = 3072
    rate: float = 2e-4
    distill_loss: str = "relative"

    def to(self, device: str) -> Case:
        """Return the case with model and batches on a device; it evaluates the outputs on the CPU."""

        def moved(batches: Sequence[object]) -> Sequence[object]:
            return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)

        def judge(forward: Forward) -> Figures:
            return self.judge(lambda *inputs: forward(*moved(inputs)).cpu())

        lessons = self.lessons and (lambda count: moved(self.lessons(count)))
        model = move_to_device(self.model, device).requires_grad_()
        return replace(self, model=model, batches=moved(self.batches), judge=judge, lessons=lessons)

    def rows(self, roundings: Sequence[str], formats: Sequence[str] | None = None) -> Iterator[Row]:
        """The float model, then each format rounded to nearest, and by presets or distilled."""
        yield {"format": "float", **self.figures(self.model).shown}
        for name in formats or self.formats:
            nearest: dict[str, float] = {}
            for mode, chosen in self._by_mode(name).items():
                figures = self.figures(self._quantized(chosen))
                nearest[f"over {mode or 'nearest'}"] = figures.loss
                yield _row(name, f"nearest, {mode}" if mode else "nearest", figures, nearest)
            for rounding in roundings:
                if rounding != DISTILLED or self.lessons:
                    yield self._optimized(name, rounding, nearest)

    def _by_mode(self, name: str) -> dict[str, MXQuantizer]:
        """Return the quantizers of a format by scale mode; "": the one of a format without FP4, which has no modes."""
        chosen = {mode: self.quantizer(name, mode) for mode in modes(name)}
        recipes = {quantizer.to_recipe() for quantizer in chosen.values()}
        return chosen if len(recipes) > 1 else {"": next(iter(chosen.values()))}

    def _optimized(self, name: str, rounding: str, nearest: dict[str, float]) -> Row:
        chosen, results = self.quantizer(name, modes(name)[-1]), []
        forget_peak()
        seconds = timed(lambda: results.append(self._quantized(chosen, rounding)))
        cost = {"seconds": f"{seconds:.1f}", "peak MB": peak()}
        figures = self.figures(results[0])
        return {**_row(name, rounding, figures, nearest), **cost}

    def by_recipe(self, chosen: MXQuantizer) -> GraphModule:
        """Return the converted model, by the algorithms that a recipe names."""
        model = self.model
        if chosen.algorithms is not None:
            model = pt2mx.optimize(model, chosen, self.batches, padding_mask=self.padding_mask)
        prepared = pt2mx.prepare_pt2e(model, chosen)
        calibrate_tensor_scales(prepared, self.batches)
        return pt2mx.convert_pt2e(prepared)

    def _quantized(self, chosen: MXQuantizer, rounding: str | None = None) -> GraphModule:
        prepared = pt2mx.prepare_pt2e(self.model, chosen) if rounding is None else self._prepared(chosen, rounding)
        return pt2mx.convert_pt2e(prepared)

    def _prepared(self, chosen: MXQuantizer, rounding: str) -> GraphModule:
        optimized = pt2mx.optimize(
            self.model, chosen, self.batches, algorithms=algorithms_of(rounding), padding_mask=self.padding_mask
        )
        if rounding != DISTILLED or self.lessons is None:
            return pt2mx.prepare_pt2e(optimized, chosen)
        prepared = pt2mx.prepare_qat_pt2e(optimized, chosen)
        return pt2mx.distill(prepared, self.model, self.lessons(self.examples), self.distill_loss, lr=self.rate)

    def loss(self, model: GraphModule) -> float:
        """Return the loss of a converted model."""
        return self.figures(model).loss

    @torch.no_grad()
    def figures(self, model: GraphModule) -> Figures:
        """Return the figures of a converted model, or of the float one."""
        return self.judge(model)


def algorithms_of(rounding: str) -> tuple[Algorithm, ...]:
    """The algorithms of a row."""
    preset = "balanced" if rounding == DISTILLED else rounding
    return ALGORITHMS.get(preset) or PRESETS[preset]


def modes(name: str) -> tuple[str, ...]:
    """The scale modes of a format of the table."""
    return SCALE_MODES.get(FORMATS.get(name, ("mxfp4", None))[0], SCALE_MODES["mxfp4"])


def _row(name: str, rounding: str, figures: Figures, nearest: dict[str, float]) -> Row:
    shares = {key: f"{figures.loss / loss:.2f}" for key, loss in nearest.items()}
    return {"format": name, "rounding": rounding, **figures.shown, "loss": f"{figures.loss:.4f}", **shares}


def config(name: str, scale_mode: str) -> MXQuantizationConfig:
    """A format of the table, with FP4 of that scale mode. Each activation has a tensor scale of its own."""
    weight, activation = (parse(e, scale_mode=scale_mode) if e in SCALE_MODES else e for e in FORMATS[name])
    return get_default_mx_quantization_config(weight=weight, activation=activation, tensor_scale="dynamic")


def everything(name: str, scale_mode: str) -> MXQuantizer:
    """Quantizes every operator in one format."""
    return MXQuantizer().set_global(config(name, scale_mode))


def cosines(inputs: Tensor, model: GraphModule) -> Callable[[Forward], Figures]:
    """Return a metric: the cosine of the outputs to the float outputs, mean and worst. The loss is 1 - mean."""
    with torch.no_grad():
        wanted = model(inputs)

    def judge(forward: Forward) -> Figures:
        cosine = cosine_similarity(forward(inputs), wanted)
        return Figures(1 - float(cosine.mean()), {"cosine": f"{cosine.mean():.4f}", "worst": f"{cosine.min():.4f}"})

    return judge
