"""The layouts of quantized checkpoints: the tensors in which each holds codes and scales.

A weight is (..., N, K) with blocks of 32 along K. Its codes are uint8 (..., N, bytes of K) and its scales uint8
(..., N, K / 32), as pt2mx stores them; no layout here holds other bytes, only other names, dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.formats import ELEMENTS
from pt2mx.spec import MXSpec

#: values that share a scale, in every layout
BLOCK = 32
#: a scale of this byte is NaN by the specification; readers of these checkpoints take it for 2**128
_NAN_SCALE = 255


@dataclass(frozen=True)
class Stored:
    """The tensors of one weight: what their names add to the weight's, and their dtypes."""

    data: str
    scale: str
    dtype: torch.dtype = torch.uint8
    #: a block's codes are a dimension of their own: (..., N, K / 32, bytes of 32)
    by_block: bool = False


_PACKED = Stored("_packed", "_scale")
_BYTES = Stored("", "_scale")
_FLOAT8 = Stored("", "_scale", torch.float8_e4m3fn)


@dataclass(frozen=True)
class Layout:
    """A kind of checkpoint.

    Args:
        name: as users name it, which is the `quant_method` of its `quantization_config`.
        stored: element -> the tensors of a weight in that element.
        inputs: element -> the scale modes by which readers quantize inputs to it, in each call.
        always_inputs: True where readers quantize the inputs of each quantized weight.
        dtypes: of the model; readers compute in it.
        only_experts: True where the experts of a mixture alone are quantized.
        embeddings: the elements in which readers take the weight of an embedding.
    """

    name: str
    stored: Mapping[str, Stored]
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always_inputs: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    only_experts: bool = False
    embeddings: tuple[str, ...] = ()

    def names(self, weight: str, element: str) -> tuple[str, str]:
        """Give the names of the codes and of the scales of a weight.

        Args:
            weight: its name, such as "model.layers.0.mlp.down_proj.weight".
            element: one of `stored`.

        Returns:
            The two names.
        """
        stored = self.stored[element]
        return weight + stored.data, weight + stored.scale

    def to_tensors(self, weight: str, element: str, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Give the tensors in which the layout holds a weight.

        Args:
            weight: its name.
            element: its element.
            data: (..., N, bytes of K) uint8.
            scale: (..., N, K / 32) uint8.

        Returns:
            The tensors by name, views of these.

        Raises:
            MXError: where the layout cannot hold them, or a scale is NaN.
        """
        stored = self.check(weight, element)
        check_grid(weight, element, data, scale)
        if bool((scale == _NAN_SCALE).any()):
            raise MXError(f"{weight} has blocks that are NaN, which readers of {self.name} take for numbers: mend them")
        codes = data.unflatten(-1, (scale.shape[-1], -1)) if stored.by_block else data.view(stored.dtype)
        return dict(zip(self.names(weight, element), (codes, scale), strict=True))

    def from_tensors(self, weight: str, element: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Give the codes and scales of a weight: `to_tensors` read backwards.

        Args:
            weight: its name.
            element: its element.
            tensors: of the checkpoint, by name; scales as bytes or `torch.float8_e8m0fnu`.

        Returns:
            data (..., N, bytes of K) and scale (..., N, K / 32), uint8, views of these.

        Raises:
            MXError: where a tensor is missing, or has another dtype or shape.
        """
        stored = self.check(weight, element)
        found = []
        for name in self.names(weight, element):
            if name not in tensors:
                raise MXError(f"the checkpoint holds no {name}, which {self.name} has for {weight} in {element}")
            tensor = tensors[name]
            if tensor.dtype not in _BYTE_DTYPES:
                raise MXError(f"{name} is {tensor.dtype}: {self.name} holds bytes of {element} and of E8M0 scales")
            found.append(tensor.view(torch.uint8))
        data, scale = found[0].flatten(-2) if stored.by_block else found[0], found[1]
        check_grid(weight, element, data, scale)
        return data, scale

    def check(self, weight: str, element: str) -> Stored:
        """Give the row of an element.

        Args:
            weight: what is to be held.
            element: its element.

        Returns:
            How it is stored.

        Raises:
            MXError: where the layout does not have the element.
        """
        if element not in self.stored:
            able = [layout.name for layout in LAYOUTS.values() if element in layout.stored]
            raise MXError(
                f"{self.name} cannot hold {weight} in {element}: it has {', '.join(self.stored)}; "
                + (f"{', '.join(able)} can" if able else "no layout can")
            )
        return self.stored[element]

    def check_embedding(self, module: str, element: str) -> None:
        """Raise an error where readers would not find the codes of an embedding.

        Args:
            module: the embedding.
            element: of its weight.

        Raises:
            MXError: naming what they read.
        """
        if element not in self.embeddings:
            able = f"embeddings in {' or '.join(self.embeddings)} alone" if self.embeddings else "no packed embeddings"
            raise MXError(f"readers of {self.name} take {able}: leave {module} in high precision")

    def check_inputs(self, module: str, spec: MXSpec | None) -> None:
        """Raise an error where readers would not quantize a module's inputs as `spec` says.

        Args:
            module: whose inputs they are.
            spec: of the inputs; None: in high precision.

        Raises:
            MXError: naming what they do.
        """
        if spec is None:
            if self.always_inputs:
                raise MXError(f"{self.name} quantizes inputs too: quantize those of {module} to {self._able()}")
            return
        if not self.inputs:
            raise MXError(f"{self.name} holds weights alone: leave the inputs of {module} in high precision")
        modes = self.inputs.get(spec.element.name, ())
        if spec.scale_mode not in modes or spec.block_size != BLOCK or spec.rounding != "even":
            raise MXError(f"{self.name} cannot say that inputs of {module} are {spec}: it has {self._able()}")

    def _able(self) -> str:
        return (
            ", ".join(f"{element} with scale_mode {' or '.join(modes)}" for element, modes in self.inputs.items())
            + f" in blocks of {BLOCK}"
        )


_BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: every layout that is written and read
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "compressed-tensors",
            {"fp4_e2m1": _PACKED, "fp6_e2m3": _PACKED, "fp8_e4m3": _FLOAT8},
            # of E4M3 a block whose largest value is exactly 1.75 * 2**e gets a scale twice that of "rceil"
            {"fp4_e2m1": ("even",), "fp6_e2m3": ("even",), "fp8_e4m3": ("rceil",)},
            # transformers initializes an embedding before its codes are decoded, and looks for `weight`
            embeddings=("fp8_e4m3",),
        ),
        Layout(
            "mxfp4",
            {"fp4_e2m1": Stored("_blocks", "_scales", by_block=True)},
            only_experts=True,
        ),
        Layout(
            "quark",
            {"fp4_e2m1": _BYTES, "fp6_e2m3": _BYTES, "fp6_e3m2": _BYTES, "fp8_e4m3": _FLOAT8},
            dict.fromkeys(("fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3"), ("even", "floor", "ceil")),
            dtypes=_FLOATS,
        ),
        Layout(
            "modelopt",
            {"fp8_e4m3": _FLOAT8},
            {"fp8_e4m3": ("rceil",)},
            always_inputs=True,
            dtypes=_FLOATS,
        ),
        Layout(
            "fp8",
            {"fp8_e4m3": Stored("", "_scale_inv", torch.float8_e4m3fn)},
            dtypes=_FLOATS,
        ),
    )
}


def layout_named(name: object) -> Layout:
    """Give the layout of that name.

    Args:
        name: a key of `LAYOUTS`.

    Returns:
        The layout.

    Raises:
        MXError: for another name.

    Example:
        >>> from pt2mx.pt2e.checkpoints.layouts import layout_named
        >>> layout_named("compressed-tensors").names("fc.weight", "fp4_e2m1")
        ('fc.weight_packed', 'fc.weight_scale')
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise MXError(f"unknown layout {name!r}: {nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def check_grid(weight: str, element: str, data: Tensor, scale: Tensor) -> None:
    """Raise an error for codes and scales that are no blocks of 32 along the last dimension.

    Args:
        weight: their name.
        element: of the codes.
        data: (..., N, bytes of K) uint8.
        scale: (..., N, K / 32) uint8.

    Raises:
        MXError: naming the shapes.
    """
    block_bytes = BLOCK * ELEMENTS[element].bits // 8
    if data.shape != (*scale.shape[:-1], scale.shape[-1] * block_bytes):
        raise MXError(
            f"{weight} has codes of shape {tuple(data.shape)} and scales of shape {tuple(scale.shape)}: of {element} a "
            f"scale must have {block_bytes} bytes of codes, a whole block of {BLOCK} values along the last dimension"
        )
