"""transformers' architectures, as `hugging_face.yaml` lists them, and the inputs that they take."""

from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from pt2mx.extras import import_extra
from tests.sweep.architecture import Architecture

#: of 99 tokens three are special, and the last marks a patch of an image
_ORDINARY, _PATCH = (3, 98), 98

Inputs = dict[str, Tensor]


def _ids(*shape: int) -> Tensor:
    return torch.randint(*_ORDINARY, shape)


def tokens(config: object) -> Inputs:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"input_ids": _ids(2, 10), "attention_mask": mask}


def unmasked(config: object) -> Inputs:
    return {"input_ids": _ids(2, 8)}


def seq2seq(config: object) -> Inputs:
    return {**tokens(config), "decoder_input_ids": _ids(2, 6)}


def masked_seq2seq(config: object) -> Inputs:
    return {**seq2seq(config), "decoder_attention_mask": torch.ones(2, 6, dtype=torch.int64)}


def image(config: object) -> Inputs:
    size = getattr(config, "image_size", 64)
    return {"pixel_values": torch.randn(2, 3, *(size if isinstance(size, list | tuple) else (size, size)))}


def image_and_points(config: object) -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": 64 * torch.rand(1, 1, 2, 2)}


def video(config: object) -> Inputs:
    return {"pixel_values": torch.randn(1, config.num_frames, 3, config.image_size, config.image_size)}


def wave(config: object) -> Inputs:
    return {"input_values": torch.randn(2, 800)}


def channel_wave(config: object) -> Inputs:
    return {"input_values": torch.randn(1, 1, 640)}


def spoken_wave(config: object) -> Inputs:
    return {"input_values": torch.randn(1, 1600), "decoder_input_ids": _ids(1, 6)}


def spectrogram(config: object) -> Inputs:
    return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}


def speech(config: object) -> Inputs:
    return {"input_features": torch.randn(2, config.num_mel_bins, 40), "decoder_input_ids": _ids(2, 6)}


def spoken_frames(config: object) -> Inputs:
    return {"input_features": torch.randn(2, 40, config.input_feat_per_channel), "decoder_input_ids": _ids(2, 6)}


def caption(config: object) -> Inputs:
    return {**tokens(config), "pixel_values": torch.randn(2, 3, 32, 32)}


def image_in_text(config: object) -> Inputs:
    ids = _ids(1, 24)
    ids[:, 2:18] = _PATCH
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }


def regions(config: object) -> Inputs:
    return {**tokens(config), "visual_embeds": torch.randn(2, 4, config.visual_embedding_dim)}


def boxes(config: object) -> Inputs:
    features = torch.randn(2, 4, config.visual_feat_dim)
    return {**tokens(config), "visual_feats": features, "visual_pos": torch.rand(2, 4, 4)}


def series(config: object) -> Inputs:
    return {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}


def forecast(config: object) -> Inputs:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future),
        "future_time_features": torch.randn(2, future, 1),
    }


def trajectory(config: object) -> Inputs:
    return {
        "states": torch.randn(1, 5, config.state_dim),
        "actions": torch.randn(1, 5, config.act_dim),
        "rewards": torch.randn(1, 5, 1),
        "returns_to_go": torch.randn(1, 5, 1),
        "timesteps": torch.arange(5)[None],
        "attention_mask": torch.ones(1, 5),
    }


def _architecture(name: str, kind: str, inputs: Callable[[object], Inputs], settings: dict) -> Architecture:
    def construct() -> tuple[nn.Module, Inputs]:
        model = getattr(import_extra("transformers", "hf"), name)
        config = model.config_class(**settings)
        return model(config), inputs(config)

    return Architecture(name, kind, construct, _SEEDS.get(name, 0))


#: It decodes the best of its queries. With most weights two are nearly equal, and the last bit of a sum, which is
#: another on another processor, decides between them; with these one is better by far.
_SEEDS = {"RTDetrForObjectDetection": 3}


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
del _TABLE["bases"]

ARCHITECTURES = tuple(
    _architecture(name, kind, globals()[inputs], settings)
    for kind, rows in _TABLE.items()
    for name, (inputs, settings) in rows.items()
)
