from types import SimpleNamespace

import pytest
import torch

from pt2mx import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.float_model import export_loaded
from pt2mx.pt2e.models.float_models import _transform, call, load_model
from pt2mx.pt2e.models.input_files import read_image
from pt2mx.pt2e.models.samples import sentences

FACTORIES = """
import torch
from torch import nn

class Add(nn.Module):
    def forward(self, x, y):
        return x + y

def plain():
    return nn.Linear(4, 2), torch.ones(3, 4)

def dynamic():
    return Add(), (torch.ones(3, 4), torch.ones(3, 4)), ({0: torch.export.Dim("n")}, {0: torch.export.Dim("n")})

def named():
    return Add(), {"x": torch.ones(3), "y": torch.ones(3)}

def wrong():
    return nn.Linear(4, 2)
"""


@pytest.fixture
def factories(tmp_path):
    path = tmp_path / "my_models.py"
    path.write_text(FACTORIES)
    return path


def test_sentences_are_questions_and_as_many_answers():
    texts = sentences()
    assert len(texts) == 72 and len(set(texts)) == 72
    assert all(t.endswith("?") or i == 22 for i, t in enumerate(texts[:36]))
    assert not any("?" in t or "|" in t for t in texts[36:])


@pytest.mark.compiled
def test_minilm_is_the_pretrained_encoder(minilm):
    """The embedding of a question is closest to the embedding of its answer, as in training."""
    with torch.no_grad():
        embeddings = minilm.program.module()(*minilm.inputs)
    assert embeddings.shape == (72, 384)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(72), atol=1e-5)
    result = (embeddings[:36] @ embeddings[36:].T).argmax(1)
    assert (result == torch.arange(36)).sum() >= 34


def test_torchvision(monkeypatch):
    loaded = load_model("torchvision:squeezenet1_1")
    assert call(loaded.module, loaded.example).shape == (2, 1000)
    again = load_model("torchvision:squeezenet1_1")
    assert torch.equal(next(loaded.module.parameters()), next(again.module.parameters()))


@pytest.mark.parametrize(("name", "batch"), [("plain", (torch.ones(3, 4),)), ("dynamic", None), ("named", None)])
def test_factories(name, batch, factories):
    loaded = load_model(f"{factories}:{name}")
    with torch.no_grad():
        expected = call(loaded.module, loaded.example)
        assert torch.equal(call(export_loaded(loaded).module(), loaded.example), expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("minlm", "unknown model 'minlm': did you mean 'minilm'"),
        ("torchvision:resnet81", "torchvision has no model 'resnet81': did you mean 'resnet18'"),
        ("hf:/no/such/folder", "no Hugging Face checkpoint"),
        ("nothing.py:make", "no file 'nothing.py'"),
        ("{}:plian", "has no function 'plian': did you mean 'plain'"),
        ("{}:wrong", "wrong must return"),
        ("{}", r"the model '.*\.py' names no function: give .*\.py:FACTORY"),
        ("minilm:x", "unknown model 'minilm:x': did you mean 'minilm'"),
        (
            "net:make",
            "unknown model 'net:make': .*allowed: minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME, module.py:factory",
        ),
    ],
)
def test_unknown_models(source, message, factories):
    with pytest.raises(MXError, match=message):
        load_model(source.format(factories))


def test_a_call_leaves_its_batch():
    x = torch.ones(3)
    for batch in ((x,), {"x": x}):
        assert torch.equal(call(lambda x: x.add_(1), batch), torch.full((3,), 2.0)) and torch.equal(x, torch.ones(3))


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
    prepared = [transform(read_image(file)) for file in files]
    assert torch.equal(first, torch.stack(prepared[:2])) and torch.equal(
        second, torch.stack([prepared[2], prepared[0]])
    )
    red = (torch.tensor([1.0, 0, 0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(first[0, :, 100, 100], red, atol=1e-5)


def test_images_of_other_proportions_are_cropped(photos):
    loaded = load_model("torchvision:lraspp_mobilenet_v3_large")
    (first,), _ = loaded.readers["images"](sorted(photos.iterdir())).values()
    assert first.shape == loaded.example[0].shape == (2, 3, 520, 520)


def test_weights_fit_the_size_of_a_model(models):
    """The `DEFAULT` weights have another size."""
    assert models.get_model_weights("vit_h_14").DEFAULT.transforms().crop_size == [518]
    assert _transform(models, "vit_h_14", SimpleNamespace(image_size=224)).crop_size == [224]
    assert _transform(models, "vit_h_14", SimpleNamespace(image_size=100)) is None


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_fpn", "r3d_18", "raft_small"])
def test_models_of_lists_and_videos_take_no_images(name, models):
    assert _transform(models, name, SimpleNamespace()) is None
