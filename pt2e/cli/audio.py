"""Recordings as inputs of language models: to calibrate with, and to transcribe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.pt2e.models.names import KINDS, RECORDINGS, input_files
from pt2mx.pt2e.models.processors import FeatureExtractor, media_config
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def takes_audio(model: Any) -> bool:
    """Return True for a model of transformers, or a `LanguageModel`, whose encoder reads audio."""
    return model.main_input_name in ("input_features", "input_values")


def calibration_audio(source: str | None, model: Any, name: str, quantizer: MXQuantizer) -> list[Tensor]:
    """Return the features or samples of the recordings in a folder, for the model of a checkpoint; none without one."""
    extractor = FeatureExtractor(name, media_config(model.config))  # without one, the result could read no recording
    if source in (None, "none"):
        if look_at_inputs(quantizer.algorithms or ()):
            raise MXError(
                "the algorithms look at inputs: give --calibration a folder of .wav files, or --optimize fast"
            )
        return []
    files = [file for file in input_files(source) if KINDS[file.suffix.lower()] == RECORDINGS]
    if not files:
        raise MXError(f"no recordings in {source!r}: a model of audio is calibrated with a folder of .wav files")
    return [_inputs(extractor, file)[model.main_input_name] for file in files]


def audio_inputs(model: Any, folder: str, file: str) -> dict[str, Tensor]:
    """Return the inputs of `generate` for a recording, by the feature extractor in the folder of a `LanguageModel`."""
    if not takes_audio(model):
        raise MXError(f"{folder!r} reads no audio: give --prompt")
    inputs = _inputs(FeatureExtractor(folder, media_config(model.config)), Path(file))
    return {name: inputs[name] for name in (model.main_input_name, "attention_mask") if name in inputs}


def _inputs(extractor: FeatureExtractor, file: Path) -> dict[str, Tensor]:
    samples = extractor.read(file)
    if extractor.longest is not None and len(samples) > extractor.longest:
        seconds, longest = len(samples) / extractor.rate, extractor.longest / extractor.rate
        raise MXError(f"{str(file)!r} has {seconds:.1f} seconds, the model reads {longest:.1f}: split the recording")
    return extractor.inputs([samples])
