import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.cli.models import call, load_model
from pt2mx.pt2e.language.texts import sentences

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


@pytest.mark.parametrize(("name", "batch"), [("plain", (torch.ones(3, 4),)), ("dynamic", None), ("named", None)])
def test_factories(name, batch, factories):
    loaded = load_model(f"{factories}:{name}")
    with torch.no_grad():
        want = call(loaded.module, loaded.example)
        assert torch.equal(call(loaded.export().module(), loaded.example), want)


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
