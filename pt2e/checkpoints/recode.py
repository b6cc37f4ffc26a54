"""Convert the codes and scales of a weight to another format that holds the same values, or refuse."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.elements import decode
from pt2mx.kernels.float_scales import has_each, scale_values, steps_of
from pt2mx.nv_scales import mx_to_nv_scales, nv_to_mx_scales
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.weight_formats import NVFP4, NVFP4_DIVISOR, PackedTensors, format_of, spec_of
from pt2mx.spec import MXSpec

#: weight format -> the formats that may hold the same values under the same codes, the most similar first
_ALIKE = {
    "fp4_e2m1": (NVFP4, NVFP4_DIVISOR),
    NVFP4: (NVFP4_DIVISOR, "fp4_e2m1"),
    NVFP4_DIVISOR: (NVFP4, "fp4_e2m1"),
    "fp8_e4m3{128x128}": ("fp8_e4m3",),
}


def alike_form(form: str, stored: Container[str]) -> str | None:
    """Return the format to which `recode` converts weights of another.

    Args:
        form: the format of the weights.
        stored: the formats of a layout.

    Returns:
        The format itself where the layout has it, or another one; None: the layout has none.
    """
    return next((one for one in (form, *_ALIKE.get(form, ())) if one in stored), None)


def tensor_scaled_inputs(inputs: MXSpec, layout: Layout) -> MXSpec | None:
    """Return the format with which libraries of a layout quantize inputs that have a tensor scale.

    Args:
        inputs: the format of the inputs; its tensor scale is a factor or a divisor.
        layout: the layout.

    Returns:
        Its own format for the same elements and scales of blocks; None: it has none.
    """
    form = alike_form(format_of(inputs), [one for one in layout.inputs if spec_of(one).has_tensor_scale])
    return None if form is None else spec_of(form).replace(scale_mode=layout.inputs[form][0])


def recode(
    name: str, packed: PackedTensors, form: str, dtype: torch.dtype, factor: Tensor | None = None
) -> PackedTensors:
    """Convert a weight to a format of `alike_form`: its codes stay, and scales change.

    Args:
        name: the weight, for errors.
        packed: its codes and scales.
        form: the new format.
        dtype: the dtype of the model, in which the values stay equal. A tensor scale and its reciprocal are equal in
            bfloat16 only.
        factor: the tensor scale, a power of two, of E8M0 scales that become NVFP4's; None: the largest scale decides.

    Returns:
        The weight in the new format.

    Raises:
        MXError: where its scales cannot hold the same values.
    """
    old, new = packed.spec, spec_of(form)
    if format_of(old) == form:
        return packed
    if has_each(packed.tensor_scale):
        return _each(name, packed, form, dtype)
    try:
        if old.block_rows > 1:
            return packed._replace(scale=_spread(packed), spec=new)
        if old.has_e8m0_scale:
            scale, factor = mx_to_nv_scales(packed.data, packed.scale, old, tensor_scale=factor)
            return PackedTensors(packed.data, scale, new, factor.clone() if form == NVFP4 else factor.reciprocal())
        if format_of(old) == NVFP4_DIVISOR:
            packed = _reciprocal(packed, spec_of(NVFP4), dtype)
        if form == NVFP4_DIVISOR:
            return _reciprocal(packed, new, dtype)
        if form == NVFP4:
            return packed
        scale = nv_to_mx_scales(packed.data, packed.scale, packed.stated_tensor_scale, packed.spec)
        return PackedTensors(packed.data, scale, new)
    except MXError as error:
        raise MXError(f"{name} cannot be converted to {form}: {error}") from None


def _each(name: str, packed: PackedTensors, form: str, dtype: torch.dtype) -> PackedTensors:
    """Convert matrices with a tensor scale each."""
    matrices = enumerate(zip(packed.data, packed.scale, packed.stated_tensor_scale, strict=True))
    recoded = [recode(f"{name}[{i}]", PackedTensors(d, s, packed.spec, t), form, dtype) for i, (d, s, t) in matrices]
    scales = [one.tensor_scale for one in recoded if one.tensor_scale is not None]
    scale = torch.stack([one.scale for one in recoded])
    return PackedTensors(packed.data, scale, recoded[0].spec, torch.stack(scales) if scales else None)


def shared_factor(weights: Mapping[str, PackedTensors], form: str) -> Tensor | None:
    """Return the tensor scale with which E8M0 scales of several weights become NVFP4's.

    Args:
        weights: the weights that libraries fuse, by name.
        form: the new format.

    Returns:
        () float32, a power of two; None where `recode` needs none.

    Raises:
        MXError: where the scales of a weight do not fit.
    """
    if not spec_of(form).has_tensor_scale or not all(one.spec.has_e8m0_scale for one in weights.values()):
        return None
    recoded = (recode(name, packed, NVFP4, torch.float32) for name, packed in weights.items())
    return torch.stack([one.tensor_scale for one in recoded if one.tensor_scale is not None]).amax()


def _spread(packed: PackedTensors) -> Tensor:
    """Return the scales of blocks of several rows as scales of blocks of 32."""
    rows, columns = packed.data.shape[-2:]
    scale = packed.scale.repeat_interleave(packed.spec.block_rows, -2)[..., :rows, :]
    scale = scale.repeat_interleave(packed.spec.block_size // 32, -1)
    if columns % 32:
        raise MXError(f"its {columns} columns are no whole blocks of 32")
    return scale[..., : columns // 32].contiguous()


def _reciprocal(packed: PackedTensors, spec: MXSpec, dtype: torch.dtype) -> PackedTensors:
    """Replace the factor of a tensor by a divisor, or the other way round: the reciprocal, or one of its neighbours.

    Raises:
        MXError: where no such number gives equal values.
    """
    old = packed.stated_tensor_scale
    scales = scale_values(packed.scale.unique(), spec)
    codes = decode(torch.arange(8, dtype=torch.int32, device=old.device), spec.element)

    def values(of: MXSpec, tensor_scale: Tensor) -> Tensor:
        return (codes * steps_of(of).apply(scales, tensor_scale).unsqueeze(1)).to(dtype)

    expected = values(packed.spec, old)
    nearest = old.reciprocal()
    infinity = torch.full_like(old, float("inf"))
    for candidate in (nearest, nearest.nextafter(infinity), nearest.nextafter(-infinity)):
        if values(spec, candidate).equal(expected):
            return packed._replace(spec=spec, tensor_scale=candidate)
    raise MXError(f"no reciprocal of its tensor scale {old.item():g} gives equal values in {dtype}")
