"""Float checkpoints of tiny language models; the tensors of a checkpoint, and its model with packed weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.checkpoints.load import _load_packed
from tests.language_models import tiny_decoder, tokenizer_of_bytes


def float_checkpoint(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "20KB") -> Path:
    """Write a checkpoint in shards, with a tokenizer; return its folder."""
    tiny_decoder(family).to(dtype).save_pretrained(folder, max_shard_size=shard)
    tokenizer_of_bytes().save_pretrained(folder)
    return folder


def load_packed_model(folder: Path) -> PreTrainedModel:
    """Load a checkpoint, as `load_checkpoint` does, but as the model of transformers."""
    return _load_packed(folder)[0]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def of_weights(weight: str) -> MXQuantizer:
    """Return the quantizer that gives all weights a format."""
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight))
