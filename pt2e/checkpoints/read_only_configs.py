"""The `quantization_config` of AutoRound and of FP-Quant, whose checkpoints are read and not written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.models.layouts import LAYOUTS, Layout
from pt2mx.pt2e.models.module_schemes import Matches, Rules, Scheme, always, not_converted
from pt2mx.pt2e.models.weight_formats import (
    BLOCK,
    NVFP4_DIVISOR,
    PackedTensors,
    Stored,
    spec_of,
    with_float_scales,
)

#: (family of `data_type`, bits, group_size) of AutoRound -> the format, whose tensors are those of compressed-tensors
_AUTO_ROUND = {
    ("mx_fp", 4, BLOCK): "fp4_e2m1",
    ("mx_fp", 8, BLOCK): "fp8_e4m3",
    ("nv_fp", 4, 16): NVFP4_DIVISOR,
}


def read_auto_round(config: Mapping[str, Any]) -> Rules:
    """Read the rules: layers of `extra_config` by name or pattern, then all others.

    Raises:
        MXError: for other packing formats, and data types that are not MX or NVFP4.
    """
    packing = config.get("packing_format", "auto_round:llm_compressor")
    if "llm_compressor" not in packing:
        raise MXError(f"packing_format {packing!r} of the checkpoint: expected 'auto_round:llm_compressor'")
    rules: Rules = []
    for name, fields in (config.get("extra_config") or {}).items():
        rules.append((_named(name), _auto_round_scheme(name, {**config, **fields})))
    return [*rules, (always, _auto_round_scheme("the checkpoint", config))]


def _named(name: str) -> Matches:
    """Return the predicate of a name, or of a pattern as AutoRound writes those."""
    pattern = re.compile(name)
    return lambda module, kind: module == name or pattern.fullmatch(module) is not None


def _auto_round_scheme(name: str, fields: Mapping[str, Any]) -> Scheme | None:
    if fields.get("bits", 16) >= 16:
        return None
    form = _auto_round_form(name, fields, "")
    if (fields.get("act_bits") or 16) >= 16:
        return Scheme(form)
    if not fields.get("act_dynamic", True):
        raise MXError(f"{name} has static scales of inputs (act_dynamic), which are not read")
    inputs = _auto_round_form(name, fields, "act_")
    (mode,) = LAYOUTS["compressed-tensors"].inputs[inputs]
    return Scheme(form, spec_of(inputs).replace(scale_mode=mode))


def _auto_round_form(name: str, fields: Mapping[str, Any], prefix: str) -> str:
    kind, bits, size = (fields.get(prefix + key) for key in ("data_type", "bits", "group_size"))
    # a data type has its bits in its name, or how it is rounded: mx_fp4, mx_fp_rceil, nv_fp4_with_static_gs
    form = _AUTO_ROUND.get((str(kind)[:5], bits, size or fields.get("group_size")))  # type: ignore[arg-type]
    if form is None or not fields.get(f"{prefix}sym", True):
        expected = ", ".join(f"{kind} of {bits} bits in groups of {size}" for kind, bits, size in _AUTO_ROUND)
        raise MXError(f"{name} has {prefix}data_type {kind!r} of {bits} bits in groups of {size}: expected {expected}")
    return form


class _FPQuant(Layout):
    """The layout of FP-Quant, whose codes and scales lie next to `weight`, and which divides MXFP4 by a number too."""

    def names(self, weight: str, form: str) -> tuple[str, ...]:
        return tuple(f"{weight.removesuffix('weight')}{name}" for name in ("qweight", "scales", "weight_global_scale"))

    def from_tensors(
        self, weight: str, form: str, tensors: Mapping[str, Tensor], block: tuple[int, int] = (1, BLOCK)
    ) -> PackedTensors:
        packed = super().from_tensors(weight, form, tensors, block)
        divisor = packed.tensor_scale
        if not packed.spec.has_e8m0_scale or divisor is None:
            return packed
        if divisor.item() == 1:
            return packed._replace(tensor_scale=None)
        return with_float_scales(packed, packed.scale.view(torch.float8_e8m0fnu).float() / divisor)


FP_QUANT = _FPQuant(
    "fp-quant",
    {form: Stored("", "", tensor_scale="weight_global_scale") for form in ("fp4_e2m1", NVFP4_DIVISOR)},
    dtypes=LAYOUTS["fp8"].dtypes,
    rotation="forward_hadamard_matrix",
    unused=("weight", "dqweight", "act_global_scale", "backward_hadamard_matrix"),
)
_FP_QUANT_FORMS = {"mxfp4": "fp4_e2m1", "nvfp4": NVFP4_DIVISOR}


def read_fp_quant(config: Mapping[str, Any]) -> Rules:
    """Read the rules: the weights of all linear layers that are not named. Inputs are rotated, and not quantized.

    Raises:
        MXError: for checkpoints that hold values instead of codes.
    """
    form = _FP_QUANT_FORMS.get(str(config.get("forward_dtype", "nvfp4")))
    if form is None or config.get("pseudoquantization") or config.get("store_master_weights"):
        raise MXError(
            f"forward_dtype {config.get('forward_dtype')!r}, pseudoquantization or store_master_weights of the "
            f"checkpoint: expected codes of {' or '.join(_FP_QUANT_FORMS)}"
        )
    names = config.get("modules_to_not_convert") or ["lm_head"]
    return [(not_converted({"modules_to_not_convert": names}), None), (always, Scheme(form))]
