import os

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.pt2e.output import check_output, write_text


@pytest.fixture
def report():
    exported = torch.export.export(nn.Linear(64, 32), (torch.randn(2, 64),)).module()
    return pt2mx.quantization_report(pt2mx.prepare_pt2e(exported, MXQuantizer.from_recipe("mxfp8")))


def test_what_is_written_for_the_user_goes_into_a_folder_that_exists(report, tmp_path):
    for write in (report.to_html, report.to_json, MXQuantizer.from_recipe("mxfp8").to_recipe):
        with pytest.raises(MXError, match=r"cannot write '.*nowhere/file': it must be a file in a folder that exists"):
            write(tmp_path / "nowhere" / "file")
        with pytest.raises(MXError, match="must be a file"):
            write(tmp_path)
        assert write(tmp_path / "file") == (tmp_path / "file").read_text() == write()


def test_text_and_no_path(tmp_path):
    assert write_text("µ", None) == "µ" == write_text("µ", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == "µ".encode()


@pytest.mark.parametrize("existing", [True, False])
def test_no_permission(existing, tmp_path, monkeypatch):
    if existing:
        (tmp_path / "a").write_text("")
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))  # root may write everywhere
    with pytest.raises(MXError, match="no permission to; choose another place"):
        check_output(tmp_path / "a")
    assert asked == [tmp_path / "a" if existing else tmp_path]
