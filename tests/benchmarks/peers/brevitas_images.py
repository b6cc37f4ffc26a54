"""Brevitas on convolutions: GPTQ and Qronos, by the functions of its program for ImageNet models.

A run rounds the weights once, with activations in float, and then adds the activation quantizers of each format.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from brevitas.core.function_wrapper.ops_ste import CeilSte
from brevitas.graph.quantize import layerwise_quantize, preprocess_for_quantize
from brevitas.nn.quant_layer import QuantWeightBiasInputOutputLayer as QuantLayer
from brevitas_examples.imagenet_classification.ptq import ptq_common as program
from torch import nn

from tests.benchmarks.accuracy.efficientnet import FORMATS, large_layers
from tests.benchmarks.peers.methods import FP4
from tests.benchmarks.peers.process import Job, run

MX = {"scale_type": "po2_scale", "quant_granularity": "per_group", "quant_type": "sym"}
ELEMENTS = {
    "mxfp4": {**MX, "quant_format": "float_ocp", "bit_width": 4, "exponent_bit_width": 2, "mantissa_bit_width": 1},
    "mxint8": {**MX, "quant_format": "int", "bit_width": 8},
    None: {**MX, "quant_format": "int", "bit_width": None},
}
RESTRICT = "restrict_value_float_to_int_impl"
ALGORITHMS = {
    "GPTQ": partial(program.apply_gptq, act_order=True, create_weight_orig=True),
    "Qronos": program.apply_qronos,
}


def quantize(job: Job) -> dict[str, nn.Module]:
    batches = [(batch, None) for batch in job.inputs.split(32)]
    equalized = preprocess_for_quantize(job.model, relu6_to_relu=False, equalize_iters=20)
    large = large_layers(equalized)
    rounded = _quantized(deepcopy(equalized), large, "mxfp4", None)
    with torch.no_grad():
        rounded(job.inputs[:1])  # sets the scales
    if "algorithm" in job.options:
        ALGORITHMS[job.options["algorithm"]](model=rounded, calib_loader=batches)
    rounded = _quantized(rounded, None, "mxint8", None)
    if job.options.get("bias_correction"):
        program.apply_bias_correction(batches, rounded)
    return {name: _with_inputs(rounded, equalized, large, FORMATS[name][1]).eval() for name in FP4}


def _quantized(model: nn.Module, names: tuple[str, ...] | None, weight: str, activation: str | None) -> nn.Module:
    """Quantize the layers of these names, or all that are still in float."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    others = [] if names is None else [name for name in layers if name not in names]
    return layerwise_quantize(model, _layers(weight, activation), others)


def _layers(weight: str, activation: str | None) -> dict[type, Any]:
    parts = {"weight": {**ELEMENTS[weight], "param_method": "stats", "narrow_range": False}}
    parts["act"] = {**ELEMENTS[activation], "param_method": "stats", "scale_computation_type": "dynamic"}
    options = {f"{part}_{key}": value for part, chosen in parts.items() for key, value in chosen.items()}
    layers = program.create_quant_maps(torch.float32, bias_bit_width=None, **options)[1]
    # its MXINT8 has a scale of half the range that the largest value of a block needs
    scales = {"weight": weight, "input": activation}
    ceil = {f"{part}_{RESTRICT}": CeilSte for part, element in scales.items() if element == "mxint8"}
    return {kind: (layer, {**given, **ceil}) for kind, (layer, given) in layers.items()}


def _with_inputs(rounded: nn.Module, model: nn.Module, large: tuple[str, ...], activation: str | None) -> nn.Module:
    """Return a copy of a model with rounded weights whose layers quantize their inputs, too."""
    result, inputs = deepcopy(rounded), _quantized(deepcopy(model), large, "mxfp4", activation)
    inputs = _quantized(inputs, None, "mxint8", activation and "mxint8")
    for name, layer in inputs.named_modules():
        if isinstance(layer, QuantLayer):
            result.get_submodule(name).input_quant = layer.input_quant
    return result


if __name__ == "__main__":
    run(quantize)
