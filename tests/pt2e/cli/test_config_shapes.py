from types import SimpleNamespace

import pytest

from pt2mx.pt2e.cli.config_shapes import input_shape, part_of_media


@pytest.mark.parametrize(
    ("key", "fields", "want"),
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
def test_shapes(key, fields, want):
    assert input_shape(key, SimpleNamespace(**fields)) == want


def test_part_of_several_models():
    vision = SimpleNamespace(image_size=32)
    assert part_of_media(SimpleNamespace(vision_config=vision, text_config=None)) is vision
    assert part_of_media(SimpleNamespace(vision_config=None, encoder=vision)) is vision
    assert part_of_media(vision) is vision
