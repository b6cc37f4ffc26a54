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
from pt2mx.tensor.mx_tensor import MXTensor

_PARTS = ("qdata", "scale")
#: before the name of a tensor, in the metadata: what its parts do not tell
_KEY = "pt2mx:"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in HIGH_PRECISION}


def flatten_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain contiguous tensors, `name.qdata` and `name.scale` for each `MXTensor`, and their formats as strings.

    Raises:
        MXError: where a part's name is the name of another tensor.
    """
    tensors, metadata = {}, {}
    for name, value in state.items():
        if not isinstance(value, MXTensor):
            tensors[name] = value.contiguous()
            continue
        for part in _PARTS:
            if f"{name}.{part}" in state:
                raise MXError(f"flatten_state: {name}.{part} is a tensor of the state already: rename it")
            tensors[f"{name}.{part}"] = getattr(value, part).contiguous()
        fields = {
            "elem_dtype": value.elem_dtype.name,
            "block_size": value.block_size,
            "axis": value.axis,
            "dtype": str(value.dtype).removeprefix("torch."),
            "length": value.shape[value.axis],
        }
        metadata[_KEY + name] = json.dumps(fields)
    return tensors, metadata


def unflatten_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The state that `flatten_state` took apart; other entries of `metadata` are left alone.

    Raises:
        MXError: where a part is missing or does not fit its format.
    """
    state = dict(tensors)
    for key, text in (metadata or {}).items():
        if not key.startswith(_KEY):
            continue
        name, fields = key.removeprefix(_KEY), json.loads(text)
        try:
            qdata, scale = (state.pop(f"{name}.{part}") for part in _PARTS)
        except KeyError as missing:
            raise MXError(f"unflatten_state: {name} is an MXTensor, and its part {missing} is missing") from None
        fields["dtype"] = _DTYPES[fields["dtype"]]
        state[name] = MXTensor(qdata, scale, **fields)
    return state
