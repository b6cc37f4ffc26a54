"""Models of transformers, and their inputs."""

import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import load_minilm, smollm2_checkpoint

transformers = import_extra("transformers", "hf")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
#: model of images -> pixels of a side
IMAGES = {"resnet": 32, "vit": 32, "resnet18": 224, "vit_base": 224}


def _make(kind, config):
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval()


def _llama():
    config = transformers.LlamaConfig(**SIZES, vocab_size=128, pad_token_id=0, eos_token_id=None)
    return _make("LlamaForCausalLM", config)


def _resnet():
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
    return _make("ResNetForImageClassification", transformers.ResNetConfig(**sizes, num_labels=10))


#: name -> the function that makes the model; the small ones first
MODELS = {
    "bert": lambda: _make("BertModel", transformers.BertConfig(**SIZES, vocab_size=128, max_position_embeddings=64)),
    "llama": _llama,
    "resnet": _resnet,
    "vit": lambda: _make(
        "ViTForImageClassification", transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=10)
    ),
    "minilm": lambda: load_minilm()[0].bert,
    "resnet18": lambda: _make(
        "ResNetForImageClassification",
        transformers.ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"),
    ),
    "smollm2": lambda: transformers.AutoModelForCausalLM.from_pretrained(smollm2_checkpoint()).eval(),
    "vit_base": lambda: _make("ViTForImageClassification", transformers.ViTConfig()),
}


def example(name, seed=0, batch=2, length=12, padding=0):
    """Return inputs of a model by name; the first prompt begins with padding."""
    generator = torch.Generator().manual_seed(seed)
    if name in IMAGES:
        return {"pixel_values": torch.randn(batch, 3, IMAGES[name], IMAGES[name], generator=generator)}
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :padding] = 0
    return {"input_ids": torch.randint(1, 128, (batch, length), generator=generator), "attention_mask": mask}
