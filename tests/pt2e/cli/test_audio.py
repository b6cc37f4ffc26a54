"""Encoder-decoders on the command line: recordings and prompts in, text out."""

import json
import wave

import numpy as np
import pytest
import torch

from pt2mx import LanguageModel
from pt2mx.pt2e.cli.command import main
from tests.encoder_decoders import tiny_encoder_decoder, transformers
from tests.language_models import tokenizer_of_bytes


def write_recording(path, seconds=1, rate=16_000):
    samples = np.random.default_rng(0).integers(-9000, 9000, int(seconds * rate)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return samples.astype(np.float32) / 2**15


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the checkpoints "whisper" and "t5", and recordings."""
    path = tmp_path_factory.mktemp("audio")
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    for family in ("whisper", "t5"):
        tiny_encoder_decoder(family).save_pretrained(path / family)
        tokenizer_of_bytes().save_pretrained(path / family)
    extractor.save_pretrained(path / "whisper")
    (path / "recordings").mkdir()
    write_recording(path / "recordings" / "speech.wav", 0.8)
    return path


def quantize(path, family, *more):
    arguments = ["quantize", "--model", f"hf:{path}/{family}", "--recipe", "mxfp4_weight_only", *more]
    assert main([*arguments, "--output", f"{path}/{family}-mxfp4"]) == 0


@pytest.fixture(scope="module")
def quantized(place):
    """The folder, with what `pt2mx quantize` makes of "whisper"."""
    quantize(place, "whisper", "--calibration", str(place / "recordings"))
    return place


@pytest.fixture(scope="module")
def text_too(quantized):
    """The folder, with what `pt2mx quantize` makes of "t5" too."""
    quantize(quantized, "t5")
    return quantized


@pytest.mark.compiled
@pytest.mark.usefixtures("quantized")
def test_a_recording_is_transcribed(run, place):
    samples = write_recording(place / "speech.wav", 0.8)
    arguments = ("generate", "whisper-mxfp4", "--audio", "speech.wav", "--max-new-tokens", "9")
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    (answer,) = json.loads(out)["answers"]
    model = LanguageModel.from_pretrained(place / "whisper-mxfp4")
    extractor = transformers.AutoFeatureExtractor.from_pretrained(place / "whisper-mxfp4")
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    tokens = model.generate(features, max_new_tokens=9, do_sample=False)
    assert answer["audio"] == "speech.wav"
    assert answer["text"] == model.tokenizer.decode(tokens[0], skip_special_tokens=True)


@pytest.mark.slow
def test_a_prompt_is_answered(run, text_too):
    status, out, err = run("generate", "t5-mxfp4", "--prompt", "Hello", "--max-new-tokens", "9", "--json")
    assert status == 0, err
    model = LanguageModel.from_pretrained(text_too / "t5-mxfp4")
    options = {"max_new_tokens": 9, "do_sample": False}
    assert json.loads(out)["answers"][0]["text"] == model.generate(text="Hello", **options)
    texts = model.generate(text=["Hello", "Hi"], **options)
    assert texts == [model.generate(text="Hello", **options), model.generate(text="Hi", **options)]


def refused(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and message in err and err.count("error") == 1


@pytest.mark.compiled
@pytest.mark.usefixtures("quantized")
def test_bad_input_is_one_line(run, place):
    write_recording(place / "long.wav", 1.5)
    write_recording(place / "slow.wav", 1, 8000)
    (place / "empty").mkdir()
    audio = ("generate", "whisper-mxfp4", "--audio")
    quantize = ("quantize", "--recipe", "mxfp8", "--output", "out", "--model")
    for arguments, message in (
        ((*audio, "long.wav"), "'long.wav' has 1.5 seconds, the model reads 1.0: split the recording"),
        ((*audio, "slow.wav"), "has 8000 samples a second, the model takes 16000: convert it"),
        ((*audio, "none.wav"), "no file or folder 'none.wav': give a .wav file"),
        ((*audio, "speech.wav", "--prompt", "x"), "--audio takes no prompt"),
        (("generate", "whisper-mxfp4", "--prompt", "x"), "'whisper-mxfp4' reads audio: give --audio FILE.wav"),
        ((*quantize, "hf:whisper", "--calibration", "empty"), "no recordings in 'empty'"),
        ((*quantize, "hf:whisper", "--optimize", "best"), "the algorithms look at inputs: give --calibration a folder"),
    ):
        refused(run, arguments, message)
    assert not (place / "out").exists()


def test_a_float_model_that_does_not_continue_texts(run, place):
    (place / "text.txt").write_text("The quick brown fox")
    refused(run, ("perplexity", "t5", "--text", "text.txt"), "a t5 answers a text and does not continue it")


@pytest.mark.slow
def test_a_quantized_model_that_does_not_continue_texts(run, text_too):
    (text_too / "text.txt").write_text("The quick brown fox")
    write_recording(text_too / "speech.wav", 1.5)
    refused(run, ("generate", "t5-mxfp4", "--audio", "speech.wav"), "'t5-mxfp4' reads no audio: give --prompt")
    refused(run, ("perplexity", "t5-mxfp4", "--text", "text.txt"), "a t5 answers a text and does not continue it")


@pytest.mark.compiled
def test_compile_writes_packages(run, text_too, compiler):
    for family in ("whisper", "t5"):
        status, out, err = run("compile", f"{family}-mxfp4")
        assert status == 0 and "of 32 tokens are the same" in out, err


@torch.no_grad()
def test_a_checkpoint_without_a_feature_extractor(run, place):
    (place / "whisper" / "preprocessor_config.json").rename(place / "kept.json")
    status, _, err = run("quantize", "--model", "hf:whisper", "--recipe", "mxfp8", "--output", "out")
    (place / "kept.json").rename(place / "whisper" / "preprocessor_config.json")
    assert status == 2 and "'whisper' holds no feature extractor that can be loaded" in err
