"""`mx_specs`, the dictionaries that configure everything in microxcaling, and their command line."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping
from typing import Any

from pt2mx.errors import MXError, nearest

_FORMAT = "element of MX blocks, a name of ElemFormat; without one nothing is quantized"
_ROUND = "rounding: nearest (ties away from zero), floor (toward zero), even or dither (stochastic)"

#: key -> (default, meaning)
_SPECS: dict[str, tuple[object, str]] = {
    "scale_bits": (0, "bits of the shared exponent; 0 for 8"),
    "w_elem_format": (None, f"weights: {_FORMAT}"),
    "a_elem_format": (None, f"activations: {_FORMAT}"),
    "w_elem_format_bp": (None, f"weights in the backward pass: {_FORMAT}"),
    "a_elem_format_bp": (None, f"activations in the backward pass: {_FORMAT}"),
    "a_elem_format_bp_ex": (None, f"gradients in the matmul for the weight: {_FORMAT}"),
    "a_elem_format_bp_os": (None, f"gradients in the matmul for the input: {_FORMAT}"),
    "mx_flush_fp32_subnorms": (False, "blocks whose largest magnitude is an fp32 subnormal become zero"),
    "shared_exp_method": ("max", "max: blocks share an exponent; none: each value has its own"),
    "block_size": (0, "values that share an exponent; 0 for the whole dimension"),
    "bfloat": (0, "bits of the floats with 8 exponent bits that hold everything else; 0 for none"),
    "fp": (0, "bits of the floats with 5 exponent bits that hold everything else; 0 for none"),
    "bfloat_subnorms": (True, "true: those floats have subnormals"),
    "quantize_backprop": (True, "true: the backward pass is quantized"),
    "round": ("nearest", f"all that has none of its own: {_ROUND}"),
    "round_m": ("nearest", f"moments of an optimizer: {_ROUND}"),
    "round_weight": ("nearest", f"weights as floats: {_ROUND}"),
    "round_output": ("nearest", f"activations as floats: {_ROUND}"),
    "round_grad_weight": ("nearest", f"gradients of weights as floats: {_ROUND}"),
    "round_grad_input": ("nearest", f"gradients of activations as floats: {_ROUND}"),
    "round_mx_output": ("nearest", f"elements in the forward pass: {_ROUND}"),
    "round_mx_input_grad_input": ("nearest", f"operands of matmul and bmm in the backward pass: {_ROUND}"),
    "round_mx_weight_grad_input": ("nearest", f"the weight in the matmul for the input: {_ROUND}"),
    "round_mx_grad_output_grad_input": ("nearest", f"the gradient in the matmul for the input: {_ROUND}"),
    "round_mx_input_grad_weight": ("nearest", f"the input in the matmul for the weight: {_ROUND}"),
    "round_mx_grad_output_grad_weight": ("nearest", f"the gradient in the matmul for the weight: {_ROUND}"),
    "softmax_exp2": (False, "read by layers that are not offered"),
    "vec_use_exp2": (False, "read by layers that are not offered"),
    "vec_use_recip": (False, "read by layers that are not offered"),
    "custom_cuda": (False, "changes nothing: pt2mx's kernels compute everything"),
}
_FORMATS = tuple(key for key in _SPECS if "elem_format" in key)

#: key -> the key whose value is its default, in this order
_FOLLOWS = {
    "w_elem_format_bp": "w_elem_format",
    **dict.fromkeys(("a_elem_format_bp", "a_elem_format_bp_os", "a_elem_format_bp_ex"), "a_elem_format"),
    **dict.fromkeys(("round_m", "round_output", "round_grad_weight", "round_grad_input", "round_weight"), "round"),
    "round_mx_output": "round",
    **dict.fromkeys((key for key in _SPECS if key.startswith("round_mx_") and "grad" in key), "round_grad_input"),
}


class MxSpecs(collections.UserDict[str, Any]):
    """microxcaling's `MxSpecs`: a dictionary of every key. Missing keys have defaults, which quantize nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_keys(self.data)
        self.data = {**{key: default for key, (default, _) in _SPECS.items()}, **self.data}


get_default_mx_specs = MxSpecs


def _check_keys(specs: Mapping[str, object]) -> None:
    if not isinstance(specs, Mapping):
        raise MXError(f"mx_specs must be a dictionary, not {specs!r}")
    for key in specs:
        if key not in _SPECS:
            raise MXError(f"mx_specs have no key {key!r}: {nearest(key, _SPECS)}")


def get_backwards_mx_specs(specs: MxSpecs) -> MxSpecs:
    """Return a copy of the specs for the backward pass. Without `quantize_backprop` it quantizes nothing."""
    specs = specs.copy()
    if not specs["quantize_backprop"]:
        specs.update(dict.fromkeys(_FORMATS), block_size=0, bfloat=0, fp=0)
    return specs


def apply_mx_specs(mx_specs: Mapping[str, object] | None, default_mx_specs: MxSpecs | None = None) -> MxSpecs:
    """Return complete specs: the values of `mx_specs`, except None, replace the defaults, which change in place."""
    specs = MxSpecs() if default_mx_specs is None else default_mx_specs
    passed = {} if mx_specs is None else mx_specs
    _check_keys(passed)
    specs.update({key: value for key, value in passed.items() if value is not None})
    return specs


def finalize_mx_specs(specs: Mapping[str, object], early_exit: bool = True) -> MxSpecs | None:
    """Return complete specs. Formats of the backward pass and roundings follow from those that were passed.

    With `early_exit` specs that quantize nothing are None, which every function and layer takes.
    """
    _check_keys(specs)
    if early_exit and not any(specs.get(key) for key in (*_FORMATS, "bfloat", "fp")):
        return None
    specs = dict(specs)
    for key, followed in _FOLLOWS.items():
        if specs.get(key) is None and followed in specs:
            specs[key] = specs[followed]
    return apply_mx_specs(specs)


def add_mx_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each key to a parser: `--no_key` if its default is true, else `--key`; and
    `--skip_early_exit`."""
    group = parser.add_argument_group("mx", "MX specs")
    group.add_argument("--mx_dir", help="not used")
    for key, (default, meaning) in _SPECS.items():
        if isinstance(default, bool):
            group.add_argument(f"--{'no_' * default}{key}", action="store_true", help=meaning)
        else:
            group.add_argument(f"--{key}", type=str if default is None else type(default), help=meaning)
    group.add_argument("--skip_early_exit", action="store_true", help="specs also where nothing is quantized")
    return parser


def get_mx_specs(parsed_args: argparse.Namespace) -> MxSpecs | None:
    """Return the finalized specs of what a parser with `add_mx_args` parsed."""
    options = vars(parsed_args)
    specs = {key: options[key] for key in _SPECS if key in options}
    specs |= {key: not options[f"no_{key}"] for key in _SPECS if f"no_{key}" in options}
    return finalize_mx_specs(specs, early_exit=not options.get("skip_early_exit", False))
