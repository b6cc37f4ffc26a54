import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.models import call, load_batches, load_model, sentences

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


def test_minilm_is_the_pretrained_encoder(minilm):
    """Its embeddings say what it was trained for: a question is closest to its own answer."""
    with torch.no_grad():
        embeddings = minilm.program.module()(*minilm.inputs)
    assert embeddings.shape == (72, 384)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(72), atol=1e-5)
    found = (embeddings[:36] @ embeddings[36:].T).argmax(1)
    assert (found == torch.arange(36)).sum() >= 34


def test_torchvision(monkeypatch):
    loaded = load_model("torchvision:squeezenet1_1")
    assert call(loaded.module, loaded.example).shape == (2, 1000)
    again = load_model("torchvision:squeezenet1_1")
    assert torch.equal(next(loaded.module.parameters()), next(again.module.parameters()))


@pytest.mark.parametrize("kind", ["text", "image", "decoder"])
def test_hugging_face_folder(kind, tmp_path):
    from transformers import (  # fmt: skip
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    make, shape = {
        "text": (lambda: BertForSequenceClassification(BertConfig(vocab_size=99, **small)), (2, 2)),
        "image": (lambda: ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **small)), (2, 2)),
        "decoder": (lambda: LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **small)), (2, 33, 99)),
    }[kind]
    make().save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    with torch.no_grad():
        want = call(loaded.module, loaded.example)
        got = call(loaded.export().module(), loaded.example)
    assert got[0].shape == shape and torch.allclose(got[0], want[0], atol=1e-5)


@pytest.mark.parametrize(("name", "batch"), [("plain", (torch.ones(3, 4),)), ("dynamic", None), ("named", None)])
def test_factories(name, batch, factories):
    loaded = load_model(f"{factories}:{name}")
    with torch.no_grad():
        want = call(loaded.module, loaded.example)
        assert torch.equal(call(loaded.export().module(), loaded.example), want)


def test_batches_take_the_form_of_the_example(factories):
    positional, named = load_model(f"{factories}:dynamic"), load_model(f"{factories}:named")
    x, y = torch.zeros(3), torch.ones(3)
    for batch in ({"y": y, "x": x}, (x, y), [x, y]):
        assert [t is u for t, u in zip(positional.conform(batch), (x, y), strict=True)] == [True, True]
        assert list(named.conform(batch)) == ["x", "y"] and named.conform(batch)["y"] is y
    for batch in ({"x": x}, (x,), x, (x, y, y), {"x": x, "z": y}):
        for loaded in (positional, named):
            with pytest.raises(MXError, match=r"a batch must hold the inputs \['x', 'y'\]"):
                loaded.conform(batch)


def test_batches_of_a_folder_in_the_order_of_their_names(tmp_path):
    torch.save(torch.ones(1), tmp_path / "b.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    np.savez(tmp_path / "c.npz", x=np.ones(3, np.float32))
    np.savez(tmp_path / "d.npz", np.ones(4, np.int64), np.zeros(4, np.int64))
    (tmp_path / "notes.txt").write_text("no batch")
    a, b, c, d = load_batches(tmp_path)
    assert a["x"].shape == (2,) and b.shape == (1,) and c["x"].dtype == torch.float32
    assert isinstance(d, tuple) and [t.sum().item() for t in d] == [4, 0]


def test_bad_calibration_folders(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(MXError, match=r"must be a folder that holds \.pt or \.npz files"):
            load_batches(folder)
    (tmp_path / "x.pt").write_bytes(b"no")
    with pytest.raises(MXError, match=r"x\.pt is no batch"):
        load_batches(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("minlm", "unknown model 'minlm': did you mean 'minilm'"),
        ("torchvision:resnet81", "torchvision has no model 'resnet81': did you mean 'resnet18'"),
        ("hf:/no/such/folder", "no Hugging Face checkpoint"),
        ("nothing.py:make", "no file 'nothing.py'"),
        ("{}:plian", "has no function 'plian': did you mean 'plain'"),
        ("{}:wrong", "wrong must return"),
        ("{}", "unknown model"),
    ],
)
def test_unknown_models(source, message, factories):
    with pytest.raises(MXError, match=message):
        load_model(source.format(factories))
