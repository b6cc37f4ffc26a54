import json
import sys

import pytest

from mx_conformance.adapters import ADAPTERS, Adapter
from mx_conformance.libraries import pt2mx_torch
from pt2mx.pt2e.cli.command import main


def test_scores_and_what_is_not_installed(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(ADAPTERS, "other", Adapter(pt2mx_torch, "other", "no_such_module"))
    command = ["conformance", "--implementation", "ml_dtypes", "other", "--format", "mxfp4", "fp8_e4m3"]
    assert main([*command, "--output", str(tmp_path / "scores.md")]) == 0
    printed = capsys.readouterr()
    scale_rules, rounding, *shares = printed.out.splitlines()[1].split()[2:]
    assert (scale_rules, rounding) == ("-", "even")
    assert [share.partition("/")[0] for share in shares] == ["0", "-", "-", "-", "0", "-"]
    assert printed.out.endswith("other is not installed: pip install other\n")
    written = (tmp_path / "scores.md").read_text()
    assert written.startswith("| implementation | scale rules |") and "overflow becomes NaN" in written
    assert main([*command, "--json", "--output", str(tmp_path / "scores.json")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "scores.json").read_text())
    assert data["not_installed"] == {"other": "pip install other"}
    assert [result["conforms"] for result in data["results"]] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementation", "torcha"], "unknown implementation 'torcha': did you mean 'torchao'?"),
        (["--format", "mxfp5"], "unknown MX element format 'mxfp5'"),
        (["--format", "int4"], "format='int4' is not in the specification"),
        (["--output", "scores.txt"], "scores.txt"),
    ],
)
def test_bad_options(arguments, message, capsys):
    assert main(["conformance", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_to_install_where_the_package_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mx_conformance.adapters", None)
    assert main(["conformance"]) == 2
    assert "pip install ./tests/conformance" in capsys.readouterr().err
