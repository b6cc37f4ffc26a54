"""A disk that is full at any point of writing: an `MXError`, and no part of a file is left."""

import io
import os
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
import torch

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.files.archive import add_records
from pt2mx.pt2e.files.card_metadata import copy_files
from tests.float_checkpoints import float_checkpoint, of_weights
from tests.language_models import quantized_decoder, tiny_decoder, tokenizer_of_bytes

resource = pytest.importorskip("resource")


@contextmanager
def _longest_file(limit):
    """Let all files end at a limit, which the system reports as it does a full disk. Nothing is printed meanwhile, into
    files that are longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _files(folder):
    return {path.relative_to(folder): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def quantized():
    quantizer = of_weights("mxfp4(even,even)")
    quantizer.set_module_name_regex(".*(embed_tokens|lm_head)", None)
    return quantized_decoder("llama", quantizer, dtype="bfloat16")


def _converted(quantized, source, path):
    pt2mx.convert_checkpoint(source, path, of_weights("mxfp4"))


def _converted_gguf(quantized, source, path):
    for file in source.glob("tokenizer*"):  # it has no merges, which GGUF needs
        file.unlink()
    pt2mx.convert_checkpoint(source, path.with_suffix(".gguf"), layout="gguf")


def _saved(layout, **options):
    def write(quantized, source, path):
        path = path.with_suffix(".gguf") if layout == "gguf" else path
        pt2mx.save_checkpoint(quantized, tiny_decoder("llama").bfloat16(), path, layout, **options)

    return write


def _folder(quantized, source, path):
    pt2mx.LanguageModel(quantized.program, quantized.config, None, tokenizer_of_bytes()).save_pretrained(path)


@pytest.mark.compiled_except("save as GGUF", "folder")
@pytest.mark.filterwarnings("ignore:the setting module_name_regex")
@pytest.mark.parametrize(
    ("write", "resumes"),
    [
        (_saved(None, tokenizer=tokenizer_of_bytes()), False),
        (_saved(None, max_shard_size=20_000), False),
        (_saved("gguf"), False),
        (_folder, False),
        (_converted, True),
        (_converted_gguf, True),
    ],
    ids=["save", "save in shards", "save as GGUF", "folder", "convert", "convert to GGUF"],
)
def test_a_disk_that_is_full(write, resumes, quantized, tmp_path, monkeypatch):
    source = float_checkpoint("llama", tmp_path / "float")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "whole").mkdir()
    write(quantized, source, tmp_path / "whole" / "out")
    whole = _files(tmp_path / "whole")
    for number, limit in enumerate([0, *sorted({size - 1 for size in whole.values()})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(MXError, match="File too large") as error, _longest_file(limit):
            write(quantized, source, folder / "out")
        assert "\n" not in str(error.value) and not _files(temporary)
        left = _files(folder)
        if not resumes:  # an output that is continued has its finished files
            assert all(whole.get(path) == size and "program" not in path.name for path, size in left.items())
    if resumes:
        write(quantized, source, folder / "out")
        assert _files(folder) == whole


def test_files_of_their_own(tmp_path):
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "program.pt2")
    (tmp_path / "processor").mkdir()
    (tmp_path / "processor" / "preprocessor_config.json").write_text("{}" + " " * 100)
    (tmp_path / "to").mkdir()
    for write in (
        lambda: add_records(tmp_path / "program.pt2", {"record": bytes(100)}),
        lambda: copy_files(tmp_path / "processor", tmp_path / "to", ("*.json",), replace=False),
    ):
        with pytest.raises(MXError, match="File too large"), _longest_file(50):
            write()
    assert not os.listdir(tmp_path / "to")
