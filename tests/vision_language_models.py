"""Tiny vision-language models with random weights, and prompts with images as processors give them."""

from pathlib import Path

import torch
from torch import nn

import pt2mx
from pt2mx.extras import import_extra
from tests.language_models import tokenizer_of_bytes

transformers = import_extra("transformers", "hf")

#: the image token, the next one after the tokens of `tokenizer_of_bytes`
_IMAGE = 258
_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_key_value_heads": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"image_size": 32, "patch_size": 16}
_ROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
_TOKENS = {"image_token_id": _IMAGE, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
_QWEN_TEXT = {**_TEXT, "rope_parameters": _ROPE}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}


def _llava():
    vision = transformers.CLIPVisionConfig(**_VISION, projection_dim=32)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=_IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


def _gemma3():
    vision = transformers.SiglipVisionConfig(**_VISION)
    text = transformers.Gemma3TextConfig(**_TEXT, head_dim=16, sliding_window=8)
    tokens = {"mm_tokens_per_image": 4, "image_token_index": _IMAGE, "boi_token_index": 101, "eoi_token_index": 102}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    return transformers.Gemma3ForConditionalGeneration(config)


def _tiles(family):
    text = {**_TEXT, "model_type": "llama"}
    vision = {**_VISION, "patch_size": 8}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, image_token_id=_IMAGE, scale_factor=2
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def _qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=_QWEN_TEXT, vision_config=vision, **_TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl():
    vision = {**_QWEN_VISION, "window_size": 56, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=_QWEN_TEXT, vision_config=vision, **_TOKENS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl():
    text = {**_QWEN_TEXT, "head_dim": 16}
    vision = {**_QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


#: name -> (what makes the model, the module of its vision tower)
VISION_LANGUAGE = {
    "llava": (_llava, "vision_tower"),
    "gemma3": (_gemma3, "vision_tower"),
    "smolvlm": (lambda: _tiles("SmolVLM"), "vision_model"),
    "idefics3": (lambda: _tiles("Idefics3"), "vision_model"),
    "qwen2_vl": (_qwen2_vl, "visual"),
    "qwen2_5_vl": (_qwen2_5_vl, "visual"),
    "qwen3_vl": (_qwen3_vl, "visual"),
}


def tiny_vision_language_model(kind: str) -> nn.Module:
    """Return a model in evaluation mode; its weights are large, so that texts vary and depend on the images."""
    torch.manual_seed(0)
    model = VISION_LANGUAGE[kind][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4 if parameter.dim() > 1 else parameter)
    return model


def vision_language_checkpoint(kind: str, folder: Path) -> tuple[nn.Module, str]:
    """Write the checkpoint of a model, and return the model and the name of the module of its vision tower."""
    model = tiny_vision_language_model(kind)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model, VISION_LANGUAGE[kind][1]


def llava_processor():
    """Return a processor for the tiny LLaVA."""
    tokenizer = tokenizer_of_bytes()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 32, "width": 32}
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    options = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(images, tokenizer, image_token="<image>", **options)


def round_weights(model: nn.Module) -> nn.Module:
    """Round the weights of a model to MXFP4 in place, along the dimension that their operators sum over."""
    axes = {nn.Linear: -1, nn.Embedding: -1, nn.Conv2d: 1, nn.Conv3d: 1}
    with torch.no_grad():
        for module in model.modules():
            axis = next((axis for kind, axis in axes.items() if isinstance(module, kind)), None)
            weights = [] if axis is None else [(module.weight, axis)]
            if hasattr(module, "mm_input_projection_weight"):
                weights.append((module.mm_input_projection_weight, 0))
            for weight, axis in weights:
                spec = pt2mx.MXSpec("mxfp4", scale_mode="even", axis=axis)
                weight.copy_(pt2mx.fake_quantize_mx(weight, spec))
    return model


def image_prompts(kind: str) -> dict[str, torch.Tensor]:
    """Return three prompts, padded on the left, with two images, one image, and none."""
    random = torch.Generator().manual_seed(1)
    given, lengths = {}, [4, 4, 4]
    if kind.startswith("qwen"):
        grid = torch.tensor([[1, 4, 6], [1, 8, 4], [1, 4, 4]])
        values = 3 * 2 * (16 if kind == "qwen3_vl" else 14) ** 2
        given["image_grid_thw"], lengths = grid, (grid.prod(1) // 4).tolist()
        given["pixel_values"] = torch.randn(int(grid.prod(1).sum()), values, generator=random)
    else:
        given["pixel_values"] = torch.randn(3, 3, 32, 32, generator=random)
    if kind in ("smolvlm", "idefics3"):  # by prompt; zeros fill up the batch
        first, second, third = given["pixel_values"]
        none = torch.zeros_like(first)
        pairs = [torch.stack(pair) for pair in ((first, second), (third, none), (none, none))]
        given["pixel_values"] = torch.stack(pairs)
        given["pixel_attention_mask"] = torch.ones(3, 2, 32, 32, dtype=torch.long)
        given["pixel_attention_mask"][0, 1, :, 20:] = 0  # an image that is less wide than the others
    images = [[_IMAGE] * length for length in lengths]
    rows = [[1, 5, *images[0], 7, 8, *images[1], 9], [1, 11, 12, *images[2], 13], [1, 21, 22, 23]]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    kinds = (ids == _IMAGE).long()
    names = {"gemma3": "token_type_ids"} | {kind: "mm_token_type_ids" for kind in VISION_LANGUAGE if "qwen" in kind}
    given |= {names[kind]: kinds} if kind in names else {}
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **given}
