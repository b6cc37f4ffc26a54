from types import SimpleNamespace

import pytest
import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.images import read_image
from pt2mx.pt2e.cli.models import load_model
from pt2mx.pt2e.cli.torchvision_models import _transform


@pytest.fixture
def models():
    return import_extra("torchvision", "vision").models


@pytest.mark.parametrize(
    ("name", "weights", "size"),
    [("squeezenet1_1", "SqueezeNet1_1_Weights", 224), ("mobilenet_v3_small", "MobileNet_V3_Small_Weights", 224)],
)
def test_images_are_prepared_as_for_the_pretrained_weights(name, weights, size, models, photos):
    loaded = load_model(f"torchvision:{name}")
    assert loaded.example[0].shape == (2, 3, size, size)
    files = sorted(photos.iterdir())
    (first,), (second,) = loaded.readers["images"](files).values()
    transform = getattr(models, weights).DEFAULT.transforms()
    wanted = [transform(read_image(file)) for file in files]
    assert torch.equal(first, torch.stack(wanted[:2])) and torch.equal(second, torch.stack([wanted[2], wanted[0]]))
    red = (torch.tensor([1.0, 0, 0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(first[0, :, 100, 100], red, atol=1e-5)


def test_images_of_other_proportions_are_cropped(photos):
    loaded = load_model("torchvision:lraspp_mobilenet_v3_large")
    (first,), _ = loaded.readers["images"](sorted(photos.iterdir())).values()
    assert first.shape == loaded.example[0].shape == (2, 3, 520, 520)


def test_weights_fit_the_size_of_a_model(models):
    """Those that `DEFAULT` names are of another."""
    assert models.get_model_weights("vit_h_14").DEFAULT.transforms().crop_size == [518]
    assert _transform(models, "vit_h_14", SimpleNamespace(image_size=224)).crop_size == [224]
    assert _transform(models, "vit_h_14", SimpleNamespace(image_size=100)) is None


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_fpn", "r3d_18", "raft_small"])
def test_models_of_lists_and_videos_take_no_images(name, models):
    assert _transform(models, name, SimpleNamespace()) is None
