"""The layouts of quantized checkpoints: the tensors that hold the codes and scales of a weight.

A weight is (..., N, K) with blocks along K. Its codes are uint8 (..., N, bytes of K), its scales (..., blocks of N,
blocks of K), as pt2mx stores them. All layouts hold the same bytes, under other names, dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.formats import ELEMENTS
from pt2mx.pt2e.models.weight_formats import (
    BLOCK,
    FP8_BLOCKS,
    NVFP4,
    NVFP4_DIVISOR,
    PackedTensors,
    Stored,
    as_grid,
    check_grid,
    check_last_blocks,
    check_scales,
    format_of,
    read_tensor_scale,
    spec_by_grid,
    spec_of,
)
from pt2mx.spec import MXSpec

#: bytes of codes and of E8M0 scales, and of E4M3 scales
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PACKED = Stored("_packed", "_scale")
_BYTES = Stored("", "_scale")
_FLOAT8 = Stored("", "_scale", _E4M3)


@dataclass(frozen=True)
class Layout:
    """A kind of checkpoint.

    Args:
        name: its name, which is the `quant_method` of its `quantization_config`.
        stored: weight format -> the tensors of a weight in it.
        inputs: format -> the scale modes with which libraries quantize inputs to it at run time.
        always_inputs: the weight formats for which libraries quantize the inputs of each quantized weight.
        dtypes: dtypes of the model in which libraries compute.
        only_experts: True where only the experts of a mixture are quantized.
        linear_experts: True where experts that a model has in one tensor are linear layers of their own.
        embeddings: the formats that libraries accept for the weight of an embedding.
        by_grid: the formats for which the shapes of scales and the dtypes of both decide the format of a weight.
        input_scale, pre_scale, rotation: names of the tensor scale of a module's inputs, of their factors, (K,), and
            of the orthogonal matrix that multiplies them in groups.
        unused: the names of other tensors of a module.
        transforms: True where the configuration may state rotations of inputs.
    """

    name: str
    stored: Mapping[str, Stored]
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always_inputs: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    only_experts: bool = False
    linear_experts: bool = False
    embeddings: tuple[str, ...] = ()
    by_grid: tuple[str, ...] = ()
    input_scale: str = ""
    pre_scale: str = ""
    rotation: str = ""
    unused: tuple[str, ...] = ()
    transforms: bool = False

    def names(self, weight: str, form: str) -> tuple[str, ...]:
        """Return the names of the codes and scales of a weight in one of `stored`, and of its tensor scale if any."""
        stored = self.stored[form]
        return tuple(weight + suffix for suffix in (stored.data, stored.scale, *filter(None, [stored.tensor_scale])))

    def stored_names(self, weight: str, form: str, tensors: Container[str]) -> tuple[str, ...]:
        """Return `names` as the tensors of a checkpoint: DeepSeek-V4 calls the scales of `x.weight` `x.scale`."""
        data, scale, *others = self.names(weight, form)
        short = weight.removesuffix("weight") + "scale"
        if form in self.by_grid and scale not in tensors and short in tensors:
            scale = short
        return data, scale, *others

    def to_tensors(
        self,
        weight: str,
        form: str,
        data: Tensor,
        scale: Tensor,
        tensor_scale: Tensor | None = None,
        rows: int | None = None,
    ) -> dict[str, Tensor]:
        """Return the tensors in which the layout holds a weight, by name; they are views of the arguments, which are as
        in `PackedTensors`. `rows`: those of the whole weight, if the arguments are some of them."""
        stored, spec = self.check(weight, form), spec_of(form)
        check_grid(weight, form, spec, data, scale)
        check_last_blocks(weight, spec, data, rows)
        if bool(spec.scale_format.is_nan(scale).any()):
            raise MXError(
                f"{weight} has blocks that are NaN, which loaders of {self.name} take for numbers: fix the weight"
            )
        codes = data.unflatten(-1, (scale.shape[-1], -1)) if stored.by_block else data.view(stored.dtype)
        scale = scale.view(stored.scale_dtype)
        tensors = [codes, scale.unsqueeze(-1).unsqueeze(-3) if stored.spread_scales else scale]
        if spec.has_tensor_scale:
            if tensor_scale is None:
                raise MXError(f"{weight} in {form} has no tensor scale, which {self.name} stores: give one")
            tensors.append(tensor_scale.reshape(stored.tensor_scale_shape))
        return dict(zip(self.names(weight, form), tensors, strict=True))

    def from_tensors(
        self, weight: str, form: str, tensors: Mapping[str, Tensor], block: tuple[int, int] = (1, BLOCK)
    ) -> PackedTensors:
        """Return the codes and scales of a weight in views of the checkpoint's tensors: the inverse of `to_tensors`.

        Scales are bytes or of torch's dtypes; `block` has the rows and columns of a block that the configuration of a
        layout `by_grid` states.
        """
        stored, names = self.check(weight, form), self.stored_names(weight, form, tensors)
        if missing := [name for name in names if name not in tensors]:
            raise MXError(f"the checkpoint holds no {missing[0]}, which {self.name} has for {weight} in {form}")
        spec = self.spec_in(weight, form, tensors, block)
        data, scale, *others = (tensors[name] for name in names)
        scale = as_grid(scale, data.dim()) if stored.spread_scales else scale
        scale_dtype = spec.scale_dtype
        scale_dtypes = (scale_dtype,) if scale_dtype.is_floating_point else _BYTE_DTYPES
        for name, tensor, dtypes in ((names[0], data, _BYTE_DTYPES), (names[1], scale, scale_dtypes)):
            if tensor.dtype not in dtypes:
                kinds = f"{spec.element.name} and of {spec.scale_format.name.upper()} scales"
                raise MXError(f"{name} is {tensor.dtype}: {self.name} holds bytes of {kinds}")
        data, scale = data.view(torch.uint8), scale.view(scale_dtype)
        data = data.flatten(-2) if stored.by_block else data
        check_grid(weight, form, spec, data, scale)
        tensor_scale = read_tensor_scale(names[2], others[0]) if others else None
        check_scales(names[1], spec, data, scale)
        return PackedTensors(data, scale, spec, tensor_scale)

    def spec_in(self, weight: str, form: str, tensors: Mapping[str, Tensor], block: tuple[int, int]) -> MXSpec:
        """Return the format of a weight: `form`, or what the codes and scales say, which may be on the meta device."""
        if form not in self.by_grid:
            return spec_of(form)
        data, scale = (tensors[name] for name in self.stored_names(weight, form, tensors)[:2])
        spread = self.stored[form].spread_scales
        return spec_by_grid(weight, data, as_grid(scale, data.dim()) if spread else scale, block)

    def check(self, weight: str, form: str) -> Stored:
        """Return how the layout stores the format of a weight, which an `MXError` names where it lacks it."""
        if form not in self.stored:
            able = [layout.name for layout in LAYOUTS.values() if form in layout.stored]
            raise MXError(
                f"{self.name} cannot hold {weight} in {form}: it has {', '.join(self.stored)}; "
                + (f"{', '.join(able)} can" if able else "no layout can")
            )
        return self.stored[form]

    def check_embedding(self, module: str, form: str) -> None:
        """Raise an `MXError` where libraries would not find the codes of an embedding in a format."""
        if form not in self.embeddings:
            able = "no packed embeddings"
            if self.embeddings:
                able = f"embeddings in {' or '.join(self.embeddings)} alone"
            raise MXError(f"loaders of {self.name} take {able}: leave {module} in high precision")

    def check_inputs(self, module: str, form: str, inputs: MXSpec | None) -> None:
        """Raise an `MXError` where libraries would not quantize the inputs of a module, whose weight is in a format, to
        a spec, or leave them in high precision (None)."""
        if inputs is None:
            if form in self.always_inputs:
                raise MXError(
                    f"{self.name} quantizes inputs too: quantize the inputs of {module} to {self._inputs_text()}"
                )
            return
        if not self.inputs:
            raise MXError(f"{self.name} holds weights alone: leave the inputs of {module} in high precision")
        if not self.takes_inputs(inputs):
            able = " or ".join(layout.name for layout in LAYOUTS.values() if layout.takes_inputs(inputs))
            read = self.as_read(inputs)
            raise MXError(
                f"{self.name} cannot say that inputs of {module} are {inputs}: it has {self._inputs_text()}"
                + f"; give the layout {able}" * bool(able)
                + f"; or quantize them to {read}" * (read != inputs and self.takes_inputs(read))
            )

    def as_read(self, inputs: MXSpec) -> MXSpec:
        """Return the spec with which libraries quantize inputs that the layout states as this one's format.

        A file that is made of float weights holds no value of an input: libraries quantize inputs at run time, by
        their own scale mode, which the result has. It is the same spec where they take it, or have no such format.
        """
        modes = self.inputs.get(format_of(inputs), ())
        if not modes or inputs.scale_mode in modes or inputs.has_tensor_scale:
            return inputs
        return inputs.replace(scale_mode=modes[0])

    def takes_inputs(self, inputs: MXSpec) -> bool:
        """Return whether libraries quantize inputs to this spec."""
        name = format_of(inputs)
        same_blocks = name in self.inputs and inputs.block_size == spec_of(name).block_size
        return same_blocks and inputs.scale_mode in self.inputs[name] and inputs.rounding == "even"

    def _inputs_text(self) -> str:
        texts = []
        for form, modes in self.inputs.items():
            blocks = f" in blocks of {BLOCK}" if form in ELEMENTS else ""
            texts.append(f"{form} with scale_mode {' or '.join(modes)}{blocks}")
        return ", ".join(texts)


_FP8_GRID = {
    "fp8_e4m3": Stored("", "_scale_inv", _E4M3),
    "fp8_e4m3{128x128}": Stored("", "_scale_inv", _E4M3, _E8M0),
    FP8_BLOCKS: Stored("", "_scale_inv", _E4M3, torch.float32),
    "fp4_e2m1": Stored("", "_scale_inv", torch.int8, _E8M0),
}

#: every layout that pt2mx writes and reads
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "compressed-tensors",
            {
                "fp4_e2m1": _PACKED,
                "fp6_e2m3": _PACKED,
                "fp8_e4m3": _FLOAT8,
                NVFP4_DIVISOR: Stored("_packed", "_scale", torch.uint8, _E4M3, "_global_scale", (1,)),
            },
            # in E4M3 it doubles the scale of "rceil" for a block whose largest value is exactly 1.75 * 2**e
            {"fp4_e2m1": ("even",), "fp6_e2m3": ("even",), "fp8_e4m3": ("rceil",), NVFP4_DIVISOR: ("nearest_flush",)},
            # transformers initializes an embedding before its codes are decoded, and looks for `weight`
            embeddings=("fp8_e4m3",),
            linear_experts=True,
            input_scale="input_global_scale",
            transforms=True,
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
        Layout("fp8", _FP8_GRID, dtypes=_FLOATS, by_grid=tuple(_FP8_GRID)),
        Layout(
            "modelopt",
            {
                "fp8_e4m3": _FLOAT8,
                NVFP4: Stored("", "_scale", torch.uint8, _E4M3, "_scale_2"),
                FP8_BLOCKS: Stored("", "_scale", _E4M3, torch.float32, spread_scales=True),
            },
            {"fp8_e4m3": ("rceil",), NVFP4: ("nearest",)},
            always_inputs=("fp8_e4m3",),
            linear_experts=True,
            dtypes=_FLOATS,
            by_grid=(FP8_BLOCKS,),
            input_scale="input_scale",
            pre_scale="pre_quant_scale",
        ),
    )
}


def inputs_text(layout: Layout, old: MXSpec, new: MXSpec) -> str:
    """Return the line about inputs that a layout states in another spec."""
    return f"inputs in {old} are stated as {new}, which is how libraries that load {layout.name} quantize them"


def layout_named(name: object) -> Layout:
    """Return the layout with a name.

    Example:
        >>> from pt2mx.pt2e.models.layouts import layout_named
        >>> layout_named("compressed-tensors").names("fc.weight", "fp4_e2m1")
        ('fc.weight_packed', 'fc.weight_scale')
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise MXError(f"unknown layout {name!r}: {nearest(name, LAYOUTS)}")
    return LAYOUTS[name]
