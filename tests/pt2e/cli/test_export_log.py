import io
import logging
import sys

import pytest

from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.export_log import log_of_success

FACTORY = """
import torch
from torch import nn

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

def branch():
    return Branch(), torch.ones(4, 64)

def shape():
    return nn.Linear(64, 8), torch.ones(4, 65)
"""


@pytest.fixture
def log():
    """The records of a logger of torch, as text."""
    logger, stream = logging.getLogger("torch.fx.pt2mx_test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, handler, stream
    logger.removeHandler(handler)


def test_it_is_told_at_the_end(log, capsys, monkeypatch):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger, handler, stream = log
    with log_of_success():
        logger.warning("one")
        print("two", file=sys.stderr)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "one\ntwo\n" and handler.stream is stream and not stream.getvalue()


def test_it_is_dropped_where_the_block_fails(log, capsys, monkeypatch):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger, handler, stream = log
    with pytest.raises(ValueError, match="no"), log_of_success():
        logger.error("one")
        print("two", file=sys.stderr)
        raise ValueError("no")
    assert capsys.readouterr().err == "" and handler.stream is stream and not stream.getvalue()


def test_who_asks_for_the_log_has_it(log, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "+export")
    logger, _, stream = log
    with pytest.raises(ValueError, match="no"), log_of_success():
        logger.error("one")
        print("two", file=sys.stderr)
        raise ValueError("no")
    assert capsys.readouterr().err == "two\n" and stream.getvalue() == "one\n"


@pytest.mark.parametrize(("name", "text"), [("branch", "data-dependent expression"), ("shape", "same reduction dim")])
def test_an_export_that_fails_is_one_line(name, text, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    (tmp_path / "net.py").write_text(FACTORY)
    assert main(["compare", f"{tmp_path}/net.py:{name}", "--recipes", "mxfp8"]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("pt2mx: error: could not export the model: ")
    assert text in err and err.count("\n") == 1
