"""The layouts of quantized checkpoints: the tensors that hold the codes and scales of a weight.

A weight is (..., N, K) with blocks of 32 along K. Its codes are uint8 (..., N, bytes of K) and its scales uint8
(..., N, K / 32), as pt2mx stores them. All layouts hold the same bytes, under other names, dtypes and shapes.
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
#: a scale of this byte is NaN by the specification; libraries that load these checkpoints read it as 2**128
_NAN_SCALE = 255


@dataclass(frozen=True)
class Stored:
    """The tensors of one weight: suffixes of its name, and the dtype of codes."""

    data: str
    scale: str
    dtype: torch.dtype = torch.uint8
    #: the codes of a block have their own dimension: (..., N, K / 32, bytes of 32)
    by_block: bool = False


_PACKED = Stored("_packed", "_scale")
_BYTES = Stored("", "_scale")
_FLOAT8 = Stored("", "_scale", torch.float8_e4m3fn)


@dataclass(frozen=True)
class Layout:
    """A kind of checkpoint.

    Args:
        name: its name, which is the `quant_method` of its `quantization_config`.
        stored: element -> the tensors of a weight in that element.
        inputs: element -> the scale modes with which libraries quantize inputs to it at run time.
        always_inputs: True where libraries quantize the inputs of each quantized weight.
        dtypes: dtypes of the model in which libraries compute.
        only_experts: True where only the experts of a mixture are quantized.
        embeddings: the elements that libraries accept for the weight of an embedding.
    """

    name: str
    stored: Mapping[str, Stored]
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always_inputs: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    only_experts: bool = False
    embeddings: tuple[str, ...] = ()

    def names(self, weight: str, element: str) -> tuple[str, str]:
        """Return the names of the codes and of the scales of a weight.

        Args:
            weight: its name, such as "model.layers.0.mlp.down_proj.weight".
            element: one of `stored`.

        Returns:
            The two names.
        """
        stored = self.stored[element]
        return weight + stored.data, weight + stored.scale

    def to_tensors(self, weight: str, element: str, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the tensors in which the layout holds a weight.

        Args:
            weight: its name.
            element: its element.
            data: (..., N, bytes of K) uint8.
            scale: (..., N, K / 32) uint8.

        Returns:
            The tensors by name, views of the arguments.

        Raises:
            MXError: where the layout cannot hold them, or a scale is NaN.
        """
        stored = self.check(weight, element)
        check_grid(weight, element, data, scale)
        if bool((scale == _NAN_SCALE).any()):
            raise MXError(
                f"{weight} has blocks that are NaN, which loaders of {self.name} take for numbers: fix the weight"
            )
        codes = data.unflatten(-1, (scale.shape[-1], -1)) if stored.by_block else data.view(stored.dtype)
        return dict(zip(self.names(weight, element), (codes, scale), strict=True))

    def from_tensors(self, weight: str, element: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a weight, the inverse of `to_tensors`.

        Args:
            weight: its name.
            element: its element.
            tensors: the tensors of the checkpoint by name; scales are bytes or `torch.float8_e8m0fnu`.

        Returns:
            data (..., N, bytes of K) and scale (..., N, K / 32), uint8, views of these tensors.

        Raises:
            MXError: where a tensor is missing, or has another dtype or shape.
        """
        stored = self.check(weight, element)
        stored_bytes = []
        for name in self.names(weight, element):
            if name not in tensors:
                raise MXError(f"the checkpoint holds no {name}, which {self.name} has for {weight} in {element}")
            tensor = tensors[name]
            if tensor.dtype not in _BYTE_DTYPES:
                raise MXError(f"{name} is {tensor.dtype}: {self.name} holds bytes of {element} and of E8M0 scales")
            stored_bytes.append(tensor.view(torch.uint8))
        data, scale = stored_bytes
        data = data.flatten(-2) if stored.by_block else data
        check_grid(weight, element, data, scale)
        return data, scale

    def check(self, weight: str, element: str) -> Stored:
        """Return how the layout stores an element.

        Args:
            weight: the name of the weight, for the error.
            element: its element.

        Returns:
            The row of `stored`.

        Raises:
            MXError: where the layout lacks the element.
        """
        if element not in self.stored:
            able = [layout.name for layout in LAYOUTS.values() if element in layout.stored]
            raise MXError(
                f"{self.name} cannot hold {weight} in {element}: it has {', '.join(self.stored)}; "
                + (f"{', '.join(able)} can" if able else "no layout can")
            )
        return self.stored[element]

    def check_embedding(self, module: str, element: str) -> None:
        """Raise an `MXError` where libraries would not find the codes of an embedding.

        Args:
            module: the embedding.
            element: the element of its weight.

        Raises:
            MXError: naming the elements that libraries accept.
        """
        if element not in self.embeddings:
            able = f"embeddings in {' or '.join(self.embeddings)} alone" if self.embeddings else "no packed embeddings"
            raise MXError(f"loaders of {self.name} take {able}: leave {module} in high precision")

    def check_inputs(self, module: str, spec: MXSpec | None) -> None:
        """Raise an `MXError` where libraries would not quantize the inputs of a module as `spec` says.

        Args:
            module: the module.
            spec: the spec of its inputs; None: high precision.

        Raises:
            MXError: naming the quantization that libraries apply.
        """
        if spec is None:
            if self.always_inputs:
                raise MXError(
                    f"{self.name} quantizes inputs too: quantize the inputs of {module} to {self._inputs_text()}"
                )
            return
        if not self.inputs:
            raise MXError(f"{self.name} holds weights alone: leave the inputs of {module} in high precision")
        scale_modes = self.inputs.get(spec.element.name, ())
        if spec.scale_mode not in scale_modes or spec.block_size != BLOCK or spec.rounding != "even":
            raise MXError(f"{self.name} cannot say that inputs of {module} are {spec}: it has {self._inputs_text()}")

    def _inputs_text(self) -> str:
        formats = [f"{element} with scale_mode {' or '.join(modes)}" for element, modes in self.inputs.items()]
        return f"{', '.join(formats)} in blocks of {BLOCK}"


_BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: every layout that pt2mx writes and reads
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "compressed-tensors",
            {"fp4_e2m1": _PACKED, "fp6_e2m3": _PACKED, "fp8_e4m3": _FLOAT8},
            # in E4M3 it doubles the scale of "rceil" for a block whose largest value is exactly 1.75 * 2**e
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
    """Return the layout with a name.

    Args:
        name: a key of `LAYOUTS`.

    Returns:
        The layout.

    Raises:
        MXError: for an unknown name.

    Example:
        >>> from pt2mx.pt2e.checkpoints.layouts import layout_named
        >>> layout_named("compressed-tensors").names("fc.weight", "fp4_e2m1")
        ('fc.weight_packed', 'fc.weight_scale')
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise MXError(f"unknown layout {name!r}: {nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def check_grid(weight: str, element: str, data: Tensor, scale: Tensor) -> None:
    """Raise an `MXError` for codes and scales that are no blocks of 32 along the last dimension.

    Args:
        weight: the name of the weight.
        element: its element.
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
