import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.cli.command import command_parser
from pt2mx.pt2e.cli.float_model import load_float_model
from pt2mx.pt2e.models.float_models import load_model
from pt2mx.pt2e.models.pretrained import load_pretrained
from pt2mx.pt2e.models.processors import FeatureExtractor, ImageProcessor, media_config, shape_from_config

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8, **SMALL}
TEXT = {"vocab_size": 99, **SMALL}
IMAGES = SimpleNamespace(image_size=32, num_channels=3)
FIXED = {"size": {"height": 32, "width": 32}}


def rewrite(folder: str, *removed: str, **fields) -> None:
    file = Path(folder) / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in removed}
    file.write_text(json.dumps(config | fields))


@pytest.mark.diagonal
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "config", "fields"),
    [("ViTModel", "ViTConfig", IMAGE), ("BertModel", "BertConfig", TEXT)],
    ids=["ViT", "BERT"],
)
def test_shards_load_in_their_own_dtype(name, config, fields, dtype, stated, checkpoint, transformers):
    folder = checkpoint(name, config, fields, dtype=dtype, max_shard_size="20KB")
    assert len(list(Path(folder).glob("model-*-of-*.safetensors"))) > 1
    if not stated:
        rewrite(folder, "dtype")
    loaded = load_model(f"hf:{folder}")
    expected = getattr(transformers, name).from_pretrained(folder).state_dict()
    result = loaded.module.state_dict()
    assert result.keys() == expected.keys() and all(torch.equal(result[key], expected[key]) for key in expected)
    floats = [*loaded.module.parameters(), *loaded.example.values()]
    assert {t.dtype for t in floats if t.is_floating_point()} == {getattr(torch, dtype)}
    with torch.no_grad():
        assert loaded.module(**loaded.example)[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("command", ["quantize --recipe mxfp8 --model", "compare", "sensitivity"])
def test_the_option_dtype(command, checkpoint):
    words = [*command.split(), f"hf:{checkpoint('BertModel', 'BertConfig', TEXT)}"]
    for option, dtype in (([], torch.float32), (["--dtype", "bfloat16"], torch.bfloat16)):
        loaded = load_float_model(command_parser().parse_args([*words, *option]))
        assert {weight.dtype for weight in loaded.module.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("fields", "files"),
    [
        ({"model_type": "mine", "architectures": ["Mine"]}, "configuration_mine.py, modeling_mine.py"),
        ({"architectures": ["Mine"]}, "configuration_mine.py, modeling_mine.py"),  # transformers knows only the config
    ],
)
def test_code_of_a_checkpoint_is_not_run(fields, files, checkpoint):
    folder = checkpoint("ViTModel", "ViTConfig", IMAGE)
    code = {"AutoConfig": "configuration_mine.MineConfig", "AutoModel": "someone/mine--modeling_mine.Mine"}
    rewrite(folder, **fields, auto_map=code)
    for name in ("configuration_mine.py", "modeling_mine.py"):
        (Path(folder) / name).write_text("raise SystemExit('it ran')")
    with pytest.raises(MXError, match=f"checkpoint' needs code of its own, which is not run: .*{files[-8:]}.*factory"):
        load_pretrained(folder)


def test_code_that_transformers_has_itself_is_not_needed(checkpoint):
    folder = checkpoint("ViTModel", "ViTConfig", IMAGE)
    rewrite(folder, auto_map={"AutoConfig": "configuration_vit.ViTConfig", "AutoModel": "modeling_vit.ViTModel"})
    assert type(load_pretrained(folder)).__module__.startswith("transformers.")


def test_no_checkpoint(tmp_path):
    with pytest.raises(MXError, match="is no Hugging Face checkpoint that can be loaded"):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("ViTImageProcessor", FIXED, {"pixel_values": (2, 3, 32, 32)}),
        (
            "CLIPImageProcessor",
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 24, "width": 24}},
            {"pixel_values": (2, 3, 24, 24)},
        ),
        ("ViTImageProcessor", {"do_resize": False}, {"pixel_values": (2, 3, 32, 32)}),
        (
            "DetrImageProcessor",
            {"size": {"shortest_edge": 48, "longest_edge": 64}},
            {"pixel_values": (2, 3, 48, 48), "pixel_mask": (2, 48, 48)},
        ),
        ("WhisperFeatureExtractor", {"chunk_length": 1}, {"input_features": (2, 80, 100)}),
        ("Wav2Vec2FeatureExtractor", {"sampling_rate": 8000}, {"input_values": (2, 8000)}),
        (
            "Wav2Vec2FeatureExtractor",
            {"return_attention_mask": True},
            {"input_values": (2, 16000), "attention_mask": (2, 16000)},
        ),
        ("ASTFeatureExtractor", {"num_mel_bins": 32, "max_length": 64}, {"input_values": (2, 64, 32)}),
    ],
)
def test_shapes_are_those_of_the_processor(name, options, shapes, tmp_path, transformers):
    """Of images, and of recordings."""
    getattr(transformers, name)(**options).save_pretrained(tmp_path)
    of_images = name.endswith("ImageProcessor")
    processor = ImageProcessor(str(tmp_path), IMAGES) if of_images else FeatureExtractor(str(tmp_path), None)
    made = processor.inputs([processor.noise(), processor.noise()])
    assert {key: tuple(value.shape) for key, value in made.items()} == shapes


def test_values_of_images_are_those_of_the_processor(tmp_path, photos, transformers):
    mean, std = [0.5, 0.25, 0.75], [0.5, 0.25, 0.25]
    transformers.ViTImageProcessor(image_mean=mean, image_std=std, **FIXED).save_pretrained(tmp_path)
    processor = ImageProcessor(str(tmp_path), IMAGES)
    made = processor.inputs([processor.read(photos / "a.png")])["pixel_values"]
    assert torch.allclose(made, torch.tensor([1.0, -1, -3]).reshape(1, 3, 1, 1).expand(1, 3, 32, 32), atol=1e-5)


def test_images_of_one_channel(tmp_path, photos, transformers):
    transformers.ViTImageProcessor(image_mean=[0.0], image_std=[1.0], **FIXED).save_pretrained(tmp_path)
    processor = ImageProcessor(str(tmp_path), SimpleNamespace(image_size=32, num_channels=1))
    made = processor.inputs([processor.read(photos / "a.png")])["pixel_values"]
    assert made.shape == (1, 1, 32, 32) and torch.allclose(made, torch.tensor(76 / 255), atol=1e-5)  # red's luma
    assert processor.inputs([processor.noise()])["pixel_values"].shape == (1, 1, 32, 32)


def test_recordings_of_two_lengths_are_padded(tmp_path, write_wav, transformers):
    options = {"do_normalize": False, "return_attention_mask": True, "padding_value": 0.25}
    transformers.Wav2Vec2FeatureExtractor(**options).save_pretrained(tmp_path)
    extractor = FeatureExtractor(str(tmp_path), None)
    halves = [write_wav(f"{n}.wav", np.full((n, 1), 2**14, np.int16)) for n in (3, 2)]
    made = extractor.inputs([extractor.read(file) for file in halves])
    assert made["input_values"].tolist() == [[0.5, 0.5, 0.5], [0.5, 0.5, 0.25]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_a_checkpoint_without(tmp_path):
    for processor, called in ((ImageProcessor, "image processor"), (FeatureExtractor, "feature extractor")):
        with pytest.raises(MXError, match=f"holds no {called} that can be loaded: Can't load {called} for"):
            processor(str(tmp_path), IMAGES)


@pytest.mark.parametrize(
    ("key", "fields", "expected"),
    [
        ("pixel_values", {}, (3, 224, 224)),
        ("pixel_values", {"image_size": 32, "num_channels": 1}, (1, 32, 32)),
        ("pixel_values", {"image_size": [32, 48]}, (3, 32, 48)),
        ("input_features", {"num_mel_bins": 80, "max_source_positions": 1500}, (80, 3000)),
        ("input_features", {"input_feat_per_channel": 40, "max_source_positions": 600}, (96, 40)),
        ("input_features", {"feature_projection_input_dim": 160}, (96, 160)),
        ("input_features", {"num_mel_bins": 80}, None),
        ("input_values", {"max_length": 1024, "num_mel_bins": 128}, (1024, 128)),
        ("input_values", {"conv_stride": [5], "conv_kernel": [10], "max_length": None}, (16000,)),
        ("input_values", {}, None),
        ("spectrogram", {"image_size": 32}, None),
    ],
)
def test_shapes(key, fields, expected):
    assert shape_from_config(key, SimpleNamespace(**fields)) == expected


def test_part_of_several_models():
    vision = SimpleNamespace(image_size=32)
    assert media_config(SimpleNamespace(vision_config=vision, text_config=None)) is vision
    assert media_config(SimpleNamespace(vision_config=None, encoder=vision)) is vision
    assert media_config(vision) is vision
