import sys

import pytest

from pt2mx import MXError
from pt2mx.pt2e.files.python_file import import_file


def test_a_file_is_a_module(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pt2mx_test_file", None)  # removes the module afterwards
    (tmp_path / "pt2mx_test_file.py").write_text("value = 3")
    module = import_file(str(tmp_path / "pt2mx_test_file.py"))
    assert module.value == 3 and sys.modules["pt2mx_test_file"] is module


def test_another_name_is_refused(tmp_path):
    (tmp_path / "value.txt").write_text("value = 3")
    with pytest.raises(MXError, match=r"value.txt' is no Python file: give one whose name ends in .py"):
        import_file(str(tmp_path / "value.txt"))
