"""The values of a quantized checkpoint, computed from the definitions of the formats, without pt2mx."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: suffixes of the codes, the scales and the scale of the tensor, as the layouts name them
_SUFFIXES = (
    ("_packed", "_scale", "_global_scale"),
    ("_blocks", "_scales", None),
    ("", "_scale_inv", None),
    ("", "_scale", "_scale_2"),
)
_OF_INPUTS = ("input_scale", "input_global_scale")
#: bits -> bits of the exponent and of the mantissa
_ELEMENTS = {4: (2, 1), 6: (2, 3)}


def write_decoded(folder: Path, output: Path) -> None:
    """Write the values of a checkpoint as a float32 checkpoint."""
    output.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    for path in folder.glob("generation_config.json"):
        shutil.copy(path, output)
    save_file(decoded(folder), output / "model.safetensors", {"format": "pt"})


def decoded(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint in float32, by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    values, read = {}, set()
    for name in tensors:
        for data, scale, whole in _SUFFIXES:
            weight = name.removesuffix(data)
            if name.endswith(data) and weight + scale in tensors:
                of_tensor = tensors.get(weight + whole) if whole else None
                values[weight] = _values(tensors[name], tensors[weight + scale], of_tensor, whole == "_global_scale")
                read |= {name, weight + scale, weight + (whole or "")}
                break
    plain = {name: tensor for name, tensor in tensors.items() if name not in read and not name.endswith(_OF_INPUTS)}
    return values | {name: tensor.float() for name, tensor in plain.items()}


def _values(data: Tensor, scale: Tensor, whole: Tensor | None, divides: bool) -> Tensor:
    """Return the values of codes (..., N, bytes of K); of experts (E, N, blocks, bytes), as (E, K, N)."""
    if is_by_block := data.dim() == scale.dim() + 1:
        data = data.flatten(-2)
    if scale.dim() == data.dim() + 2:  # (blocks of N, 1, blocks of K, 1)
        scale = scale.squeeze(-1).squeeze(-2)
    block = 16 if scale.dtype == torch.float8_e4m3fn else 32
    elements = data.float() if data.dtype == torch.float8_e4m3fn else _elements(data, scale.shape[-1] * block)
    factors = scale.float() if scale.dtype.is_floating_point else torch.exp2(scale.view(torch.uint8).float() - 127)
    if whole is not None:
        factors = factors / whole if divides else factors * whole
    for axis in (-2, -1):
        length = elements.shape[axis]
        each = -(-length // factors.shape[axis])
        factors = factors.repeat_interleave(each, axis).narrow(axis, 0, length)
    values = elements * factors
    return values.transpose(-2, -1).contiguous() if is_by_block else values


def _elements(data: Tensor, count: int) -> Tensor:
    """Return the elements of codes that are packed from the lowest bit of the first byte: `count` a row."""
    size = data.shape[-1] * 8 // count
    bits = (data.view(torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    codes = (bits.flatten(-2).unflatten(-1, (count, size)) << torch.arange(size, dtype=torch.uint8)).sum(-1)
    exponent_bits, mantissa_bits = _ELEMENTS[size]
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (codes & (2**mantissa_bits - 1)).float() / 2**mantissa_bits
    magnitude = torch.where(exponent > 0, 1 + fraction, fraction)
    bias = 2 ** (exponent_bits - 1) - 1
    return magnitude * torch.exp2(exponent.clamp(min=1).float() - bias) * (1 - 2 * (codes >> (size - 1)))
