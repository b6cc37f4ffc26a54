"""Read the quantization and the factors of a module's inputs from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.packed_modules import Inputs
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.weight_formats import read_tensor_scale
from pt2mx.spec import MXSpec

#: the name of one of several experts
_EXPERT = re.compile(r"\.experts\.\d+")


def read_inputs(
    name: str, inputs: MXSpec | None, parts: Iterable[str], layout: Layout, tensors: Mapping[str, Tensor]
) -> Inputs:
    """Return what happens to the inputs of a module. Those of experts with a tensor scale each stay in high precision.

    Args:
        name: the weight of the module.
        inputs: the spec of its inputs; None: high precision.
        parts: the tensors of the checkpoint that make up the weight.
        layout: their layout.
        tensors: the tensors of the checkpoint.

    Raises:
        MXError: where the tensor scale is missing, or parts of a weight have different factors or scales.
    """
    modules = {part.rpartition(".")[0] for part in parts}
    has_tensor_scale = inputs is not None and inputs.has_tensor_scale
    if len(modules) > 1 and _EXPERT.search(next(iter(modules))):
        changed = [f"{module}.{suffix}" for module in sorted(modules) for suffix in (layout.pre_scale, layout.rotation)]
        if suffix := next((name for name in changed if name in tensors), ""):
            raise MXError(f"{suffix} changes the inputs of one expert, which is not read: give a checkpoint without")
        if has_tensor_scale:
            return Inputs()
    read: list[Tensor | None] = []
    for suffix, required in (
        (layout.input_scale, has_tensor_scale),
        (layout.pre_scale, False),
        (layout.rotation, bool(layout.rotation)),
    ):
        values = [tensors[f"{module}.{suffix}"] for module in modules if f"{module}.{suffix}" in tensors]
        if required and len(values) < len(modules):
            raise MXError(
                f"the checkpoint holds no {min(modules)}.{suffix}, which changes its inputs: fetch it again; where it "
                "quantizes weights alone, its configuration says so (input_activations null, quant_algo W4A16_NVFP4)"
            )
        if any(not tensor.equal(values[0]) for tensor in values[1:]):
            raise MXError(f"{suffix} of the parts of {name} differ, and the model multiplies the same inputs with them")
        read.append(values[0] if values else None)
    tensor_scale, pre_scale, rotation = read
    if rotation is not None and not rotation.equal(rotation.mT):
        raise MXError(f"{min(modules)}.{layout.rotation} is no symmetric matrix, which is not read")
    if tensor_scale is not None and has_tensor_scale:
        tensor_scale = read_tensor_scale(f"{min(modules)}.{layout.input_scale}", tensor_scale)
    return Inputs(inputs, tensor_scale if has_tensor_scale else None, pre_scale, rotation)
