"""The folder of a language model does not change until the new one is complete."""

import os

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.language import folder as folder_module
from pt2mx.pt2e.language.folder import save_folder
from pt2mx.pt2e.models import tokenizers
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.language_models import tokenizer_of_bytes, transformers


class Part:
    """Saves a file, and one in a subfolder, as transformers does."""

    def __init__(self, text, error=None):
        self.text, self.error = text, error

    def save_pretrained(self, folder):
        for name in ("config.json", "inner/more.json"):
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(self.text)
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def program():
    return torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_it_is_written_and_overwritten(program, tmp_path):
    save_folder(tmp_path / "new", program, None, Part("old"), None)
    (tmp_path / "new" / "tokenizer.json").write_text("of the old one")
    (tmp_path / "new" / "model.aoti.pt2").write_text("of the old one")
    (tmp_path / "new" / "notes.txt").write_text("of the user")
    save_folder(tmp_path / "new", program, None, Part("new"))
    result = contents(tmp_path / "new")
    assert set(result) == {"program.pt2", "config.json", "inner/more.json", "notes.txt"}
    assert result["config.json"] == result["inner/more.json"] == b"new"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), MXError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (Exception("of a tokenizer"), MXError),
    ],
)
def test_what_fails_leaves_what_was_there(error, raised, program, tmp_path, monkeypatch):
    save_folder(tmp_path, program, None, Part("old"))
    before = contents(tmp_path)
    with pytest.raises(raised):
        save_folder(tmp_path, program, None, Part("new", error))
    assert contents(tmp_path) == before

    def full(*arguments):
        raise pt2mx.MXError("cannot write 'program.pt2': No space left on device")

    monkeypatch.setattr(folder_module, "save_program", full)
    with pytest.raises(MXError, match=r"cannot write to .*: cannot write 'program\.pt2': No space left"):
        save_folder(tmp_path, program, None, Part("new"))
    assert contents(tmp_path) == before and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("forced", [False, True])
def test_a_clean_up_that_transformers_ignores_is_off(forced, tmp_path):
    """Decoding would warn of it, and give the same text."""
    tokenizer = tokenizer_of_bytes()
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = tokenizer.clean_up_tokenization_spaces = True
    tokenizer.init_kwargs[tokenizers._FORCED_CLEAN_UP] = forced
    setattr(tokenizer, tokenizers._FORCED_CLEAN_UP, forced)
    tokenizer.save_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).clean_up_tokenization_spaces
    loaded = load_tokenizer(tmp_path)
    assert loaded.clean_up_tokenization_spaces == forced
    assert loaded.decode(loaded("Yes , I do .").input_ids) == ("Yes, I do." if forced else "Yes , I do .")


def test_a_clean_up_of_other_tokenizers_stays(tmp_path):
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", ","))}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, clean_up_tokenization_spaces=True)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.clean_up_tokenization_spaces and loaded.decode([5, 6]) == "yes,"
