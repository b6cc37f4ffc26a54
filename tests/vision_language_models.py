"""Checkpoints of tiny vision-language models, with random weights."""

from pathlib import Path

import torch

from pt2mx.extras import import_extra

transformers = import_extra("transformers", "hf")

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT |= {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_key_value_heads": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 32, "patch_size": 16}
_ROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def _llava():
    vision = transformers.CLIPVisionConfig(**_VISION, projection_dim=32)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=100)
    return transformers.LlavaForConditionalGeneration(config)


def _qwen2_vl():
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    tokens = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    text = {**_TEXT, "rope_parameters": _ROPE}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _gemma3():
    vision = transformers.SiglipVisionConfig(**_VISION)
    text = transformers.Gemma3TextConfig(**_TEXT, head_dim=16)
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 100, "boi_token_index": 101, "eoi_token_index": 102}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    return transformers.Gemma3ForConditionalGeneration(config)


#: name -> (what makes the model, the module of its vision tower)
VISION_LANGUAGE = {
    "llava": (_llava, "vision_tower"),
    "qwen2_vl": (_qwen2_vl, "visual"),
    "gemma3": (_gemma3, "vision_tower"),
}


def vision_language_checkpoint(kind: str, folder: Path) -> tuple[torch.nn.Module, str]:
    """Write the checkpoint of a model, and return the model and the name of the module of its vision tower."""
    make, tower = VISION_LANGUAGE[kind]
    torch.manual_seed(0)
    model = make().eval()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model, tower
