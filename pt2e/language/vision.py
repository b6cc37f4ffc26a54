"""Export the vision tower of a vision-language model of transformers: pixels in, features of image tokens out.

What depends on the sizes of images in a way that cannot be traced, such as the windows of an attention, is an input of
the program: `prepare` computes it from what the processor of the family gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import WITHOUT_EXPORT, one_line, quiet_export
from pt2mx.pt2e.language.attention import PACKED_ATTENTION, register_attention
from pt2mx.pt2e.program.program import export_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: what the processors of the supported families call their images
IMAGES = "pixel_values"


class Tower(NamedTuple):
    """The vision tower of a family.

    Args:
        features: a model and the inputs of the program -> the features of image tokens, (N, hidden): first those that
            take the place of embeddings, then those that DeepStack adds to the outputs of the first layers.
        prepare: a configuration and what a processor gives -> the inputs of the program.
        given: the tensors of images that the processor gives, apart from `pixel_values`.
        kinds: the types of vision towers; empty: the one of the family.
        axes: the number of axes of a token's position; 0: it has only its number.
        bidirectional: the tokens of an image see each other.
    """

    features: Callable[..., list[Tensor]]
    prepare: Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]]
    given: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    axes: int = 0
    bidirectional: bool = False


def _of_layers(model: Any, pixel_values: Tensor) -> list[Tensor]:
    """Compute the features of LLaVA: outputs of one layer of the tower, or several."""
    config, base = model.config, model.model
    states = base.vision_tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
    layers = config.vision_feature_layer
    first = int(config.vision_feature_select_strategy == "default")  # without the class token
    chosen = [states[layer][:, first:] for layer in ([layers] if isinstance(layers, int) else layers)]
    return [base.multi_modal_projector(torch.cat(chosen, -1)).flatten(0, 1)]


def _of_last_layer(model: Any, pixel_values: Tensor) -> list[Tensor]:
    return [model.model.get_image_features(pixel_values, return_dict=True).pooler_output.flatten(0, 1)]


def _of_tiles(model: Any, pixel_values: Tensor, patch_attention_mask: Tensor) -> list[Tensor]:
    base = model.model
    pixels = pixel_values.to(model.dtype)
    states = base.vision_model(pixels, patch_attention_mask=patch_attention_mask, return_dict=True)
    return [base.connector(states.last_hidden_state).flatten(0, 1)]


def _of_patches(model: Any, pixel_values: Tensor, **sizes: Tensor) -> list[Tensor]:
    """Compute the features of the patches of all images, which see those with the same number in `cu_seqlens`."""
    output = model.model.visual(pixel_values, grid_thw=None, max_seqlen=1, max_window_seqlen=1, **sizes)
    return [output.pooler_output, *getattr(output, "deepstack_features", ())]


def _pixels(config: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {IMAGES: given[IMAGES]}


def _tiles(config: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tiles of all images without those that only fill up the batch, and the patches that are no padding."""
    vision = config.vision_config
    pixels = given[IMAGES].flatten(0, 1)
    real = pixels.flatten(1).any(1)
    mask = given.get("pixel_attention_mask")
    mask = torch.ones_like(pixels[:, 0]) if mask is None else mask.flatten(0, 1)
    patches = nn.functional.max_pool2d(mask[real].float(), vision.patch_size)
    return {IMAGES: pixels[real], "patch_attention_mask": patches > 0}


def _patches(config: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the patches of all images, and what their attention and positions need to know of the images' sizes."""
    utils, vision = import_extra("transformers.vision_utils", "hf"), config.vision_config
    grid, merge = given["image_grid_thw"], vision.spatial_merge_size
    inputs = {IMAGES: given[IMAGES], "cu_seqlens": _numbers(utils.get_vision_cu_seqlens(grid))}
    inputs["position_ids"] = utils.get_vision_position_ids(grid, merge)
    if hasattr(vision, "window_size"):
        window, ends = utils.get_vision_window_index(grid, merge, vision.window_size, vision.patch_size)
        inputs |= {"window_index": window, "cu_window_seqlens": _numbers(ends)}
    if hasattr(vision, "num_position_embeddings"):
        side = int(vision.num_position_embeddings**0.5)
        taps = utils.get_vision_interpolation_indices_and_weights(grid, side, "bilinear", True, merge)
        inputs |= dict(zip(("interp_indices", "interp_weights"), taps, strict=True))
    return inputs


def _numbers(ends: Tensor) -> Tensor:
    """Return the number of the segment of each patch."""
    return torch.repeat_interleave(torch.arange(len(ends) - 1, device=ends.device), ends.diff())


def check_images(config: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a processor gives for images, with pixels in float32, the dtype of the program's input.

    Raises:
        MXError: for pixels that are no floats, of another size than the tower takes, or without their grid.
    """
    expected = example_images(config)
    for name, example in expected.items():
        value, sizes = given.get(name), example.shape[-1:] if example.dim() == 2 else example.shape[-3:]
        if (
            not isinstance(value, Tensor)
            or value.is_floating_point() != example.is_floating_point()
            or value.dim() != example.dim()
            or value.shape[-len(sizes) :] != sizes
        ):
            actual = (
                f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            shape = ", ".join(["any"] * (example.dim() - len(sizes)) + [str(size) for size in sizes])
            raise MXError(f"{name} must be {example.dtype} of shape ({shape}), not {actual}: let the processor make it")
    if (grid := given.get("image_grid_thw")) is not None:
        merge = config.vision_config.spatial_merge_size
        if bool((grid < 1).any() or (grid[:, 1:] % merge).any()) or int(grid.prod(1).sum()) != len(given[IMAGES]):
            raise MXError(
                f"image_grid_thw {grid.tolist()} must hold times, rows and columns of {len(given[IMAGES])} patches, "
                f"rows and columns in multiples of {merge}: let the processor make it"
            )
    return {**given, IMAGES: given[IMAGES].float()}


_CLIP = ("clip_vision_model", "siglip_vision_model")
_TILES = Tower(_of_tiles, _tiles, ("pixel_attention_mask",))
_PATCHES = Tower(_of_patches, _patches, ("image_grid_thw", "mm_token_type_ids"), axes=3)
#: type of a configuration -> its vision tower
TOWERS = {
    "llava": Tower(_of_layers, _pixels, kinds=_CLIP),
    "gemma3": Tower(_of_last_layer, _pixels, ("token_type_ids",), _CLIP, bidirectional=True),
    "smolvlm": _TILES,
    "idefics3": _TILES,
    "qwen2_vl": _PATCHES,
    "qwen2_5_vl": _PATCHES,
    "qwen3_vl": _PATCHES,
}


def tower_of(config: Any) -> Tower:
    """Return the vision tower of a supported configuration."""
    return TOWERS[config.model_type]


def has_tower(model: PreTrainedModel) -> bool:
    """Return True for a model with a vision tower that can be exported."""
    vision, tower = getattr(model.config, "vision_config", None), TOWERS.get(model.config.model_type)
    return vision is not None and tower is not None and (not tower.kinds or vision.model_type in tower.kinds)


def check_trains(model: PreTrainedModel, part: str | None) -> None:
    """Raise an `MXError` for a model that lessons do not train: with a tower that is no `part` alone."""
    if part is None and has_tower(model):
        raise MXError("distillation is for models without a vision tower: give no lessons")


def check_tower(model: PreTrainedModel) -> None:
    """Raise an `MXError` for a model with a vision tower that cannot be exported."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None or has_tower(model):
        return
    text = next((name for name, one in model.base_model.named_children() if one is model.get_decoder()), "NAME")
    raise MXError(
        f"the vision tower of {type(model).__name__}, a {vision.model_type}, is not supported: supported are the "
        f"towers of {', '.join(TOWERS)}; give --part {text} (part={text!r}) for a program of text alone, or "
        f"{WITHOUT_EXPORT}"
    )


def export_tower(model: PreTrainedModel) -> ExportedProgram:
    """Export the vision tower of a model with its projection, for any number of images.

    Raises:
        MXError: for a tower that cannot be exported.
    """
    config = model.config
    example = tower_of(config).prepare(config, example_images(config))
    example = {name: value.to(model.device) for name, value in example.items()}
    shapes = {name: {0: Dim.DYNAMIC} for name in example}
    with _packed_attention(model):
        try:
            with quiet_export():
                return export_program(VisionTower(model), (), example, shapes)
        except Exception as error:
            text = f"the vision tower of {type(model).__name__} cannot be exported: {one_line(error)}"
            raise MXError(f"{text}; {WITHOUT_EXPORT}") from error


def example_images(config: Any) -> dict[str, Tensor]:
    """Return what the processor gives for two images, which differ in size where the family allows it."""
    vision, random = config.vision_config, torch.Generator().manual_seed(0)
    if (merge := getattr(vision, "spatial_merge_size", None)) is not None:
        grid = torch.tensor([[1, 2 * merge, 3 * merge], [1, 4 * merge, 2 * merge]])
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {IMAGES: torch.randn(int(grid.prod(1).sum()), values, generator=random), "image_grid_thw": grid}
    images = torch.randn(2, vision.num_channels, vision.image_size, vision.image_size, generator=random)
    return {IMAGES: images if tower_of(config).kinds else images[None]}


@contextmanager
def _packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make a tower that packs the patches of all images call its attention once, with the image of each patch."""
    config = getattr(model.base_model, "visual", model).config
    original = config._attn_implementation
    if tower_of(model.config).axes:
        register_attention()
        config._attn_implementation_internal = PACKED_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = original


class VisionTower(nn.Module):
    """A vision tower with its projection; not every family has every input."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        pixel_values: Tensor,
        patch_attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        window_index: Tensor | None = None,
        cu_window_seqlens: Tensor | None = None,
        interp_indices: Tensor | None = None,
        interp_weights: Tensor | None = None,
    ) -> list[Tensor]:
        """Compute the features of N image tokens, (N, hidden) each, of P patches or of images.

        Args:
            pixel_values: images (images, channels, height, width), or patches (P, values).
            patch_attention_mask: (images, rows, columns), False at patches of padding.
            cu_seqlens, cu_window_seqlens: (P,) int64, the number of the image, or of the window, of each patch.
            position_ids: (P, 2) int64, row and column of each patch.
            window_index: (N,) int64, the order of image tokens in which windows are contiguous.
            interp_indices, interp_weights: (P, 4), from which positions the one of a patch is interpolated.
        """
        sizes = {
            "patch_attention_mask": patch_attention_mask,
            "cu_seqlens": cu_seqlens,
            "position_ids": position_ids,
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
            "interp_indices": interp_indices,
            "interp_weights": interp_weights,
        }
        given = {name: value for name, value in sizes.items() if value is not None}
        for name in given:
            if name != "window_index":
                torch._check(given[name].shape[0] == pixel_values.shape[0])
        return tower_of(self.model.config).features(self.model, pixel_values, **given)
