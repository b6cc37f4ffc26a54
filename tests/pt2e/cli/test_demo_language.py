import pytest

from pt2mx.pt2e.cli import demo_language
from pt2mx.pt2e.cli.result import size_of
from pt2mx.pt2e.models.packaged import missing_smollm2
from tests.language_models import checkpoint


def test_from_a_checkpoint_to_text(tmp_path, monkeypatch, capsys):
    folder = checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    monkeypatch.setattr(demo_language, "smollm2_checkpoint", lambda: folder)
    actual = demo_language.main(tmp_path, "mxfp4_weight_only")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("SmolLM2-135M-Instruct by mxfp4_weight_only: 0 -> ")
    assert [line.strip()[:20] for line in lines[2:4]] == [prompt[:20] for prompt in demo_language._PROMPTS]
    assert actual["folder"] == str(tmp_path / demo_language.NAME) and (tmp_path / demo_language.NAME).is_dir()
    assert list(actual["texts"]) == list(demo_language._PROMPTS) and actual["bytes"] == size_of(actual["folder"])


@pytest.mark.slow
@pytest.mark.skipif(missing_smollm2(), reason="needs the packages of SmolLM2")
def test_a_real_model_writes_english(tmp_path, capsys):
    demo_language.main(tmp_path)
    assert "The capital of France is Paris" in capsys.readouterr().out
