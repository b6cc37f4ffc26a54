import pytest

from pt2mx.pt2e.cli import demo_language
from pt2mx.pt2e.cli.result import size_of
from pt2mx.pt2e.models.packaged import missing_smollm2
from pt2mx.pt2e.models.pretrained import load_language_model
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.language_models import checkpoint


def test_from_a_checkpoint_to_text(tmp_path, monkeypatch, capsys):
    folder = checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    monkeypatch.setattr(demo_language, "smollm2_checkpoint", lambda: folder)
    actual = demo_language.main(tmp_path, "mxfp4_weight_only")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("SmolLM2-135M-Instruct by mxfp4_weight_only: 0 -> ")
    assert [line.strip()[:20] for line in lines[2:6:2]] == [prompt[:20] for prompt in demo_language._PROMPTS]
    assert all(line.startswith("    in float: ") for line in lines[3:6:2])
    prompt = demo_language._PROMPTS[0]
    model, tokenizer = load_language_model(folder), load_tokenizer(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=demo_language._TOKENS, do_sample=False)[0, ids.shape[1] :]
    assert actual["float_texts"][prompt] == tokenizer.decode(expected, skip_special_tokens=True)
    assert actual["folder"] == str(tmp_path / demo_language.NAME) and (tmp_path / demo_language.NAME).is_dir()
    assert list(actual["texts"]) == list(demo_language._PROMPTS) and actual["bytes"] == size_of(actual["folder"])


@pytest.mark.slow
@pytest.mark.skipif(missing_smollm2(), reason="needs the packages of SmolLM2")
def test_a_real_model_writes_english(tmp_path, capsys):
    demo_language.main(tmp_path)
    out = capsys.readouterr().out
    assert "The capital of France is Paris" in out and "The chemical formula of water is H2O" in out
    assert "in float: Paris" in out and "in float: H2O" in out
