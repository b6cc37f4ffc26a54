"""State dicts that hold `MXTensor`s, as plain tensors and strings: the form of safetensors and of other files.

tensors, metadata = flatten_state(model.state_dict())
safetensors.torch.save_file(tensors, path, metadata)

with safetensors.safe_open(path, "pt") as file:
    tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
model.load_state_dict(unflatten_state(tensors, metadata))
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.scale_formats import parse_scale_format
from pt2mx.tensor.mx_tensor import MXTensor

#: before the name of a tensor, in the metadata: what its parts do not tell
_KEY = "pt2mx:"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HIGH_PRECISION}


def flatten_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Take a state apart into plain tensors and strings.

    Args:
        state: a state dict, of plain tensors and `MXTensor`s.

    Returns:
        tensors: contiguous plain tensors, `name.qdata`, `name.scale` and, where its format has one,
            `name.tensor_scale` for each `MXTensor`.
        metadata: the formats of the latter.

    Raises:
        MXError: if a part's name is the name of another tensor.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.tensor.state import flatten_state, unflatten_state
        >>> tensors, metadata = flatten_state({"w": pt2mx.MXTensor.to_mx(torch.eye(4), "mxfp4")})
        >>> list(tensors)
        ['w.qdata', 'w.scale']
        >>> unflatten_state(tensors, metadata)["w"].elem_dtype.name
        'fp4_e2m1'
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, MXTensor):
            tensors[name] = value.contiguous()
            continue
        for part, tensor in value.parts.items():
            if f"{name}.{part}" in state:
                raise MXError(f"flatten_state: {name}.{part} is a tensor of the state already: rename it")
            tensors[f"{name}.{part}"] = tensor.contiguous()
        fields = {
            "elem_dtype": value.elem_dtype.name,
            "block_size": value.block_size,
            "axis": value.axis,
            "dtype": str(value.dtype).removeprefix("torch."),
            "length": value.shape[value.axis],
        }
        if not (spec := value.spec).has_plain_scale:
            fields |= {"scale_format": spec.scale_format.name, "block_rows": spec.block_rows}
        metadata[_KEY + name] = json.dumps(fields)
    return tensors, metadata


def unflatten_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Put together the state that `flatten_state` took apart.

    Args:
        tensors: plain tensors by their names.
        metadata: the formats; other entries do not change.

    Returns:
        The state dict.

    Raises:
        MXError: if a part is missing or does not fit its format.
    """
    state = dict(tensors)
    for key, text in (metadata or {}).items():
        if not key.startswith(_KEY):
            continue
        name, fields = key.removeprefix(_KEY), json.loads(text)
        names = ["qdata", "scale"]
        if parse_scale_format(fields.get("scale_format", "e8m0")).tensor:
            names.append("tensor_scale")
        try:
            parts = [state.pop(f"{name}.{part}") for part in names]
        except KeyError as missing:
            raise MXError(f"unflatten_state: {name} is an MXTensor, and its part {missing} is missing") from None
        fields["dtype"] = _DTYPES[fields["dtype"]]
        qdata, stored, *tensor_scale = parts
        state[name] = MXTensor(qdata, stored, **fields, tensor_scale=next(iter(tensor_scale), None))
    return state
