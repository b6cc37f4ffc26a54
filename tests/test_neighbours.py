"""The environments with the newest neighbours: their table, what pip is told, and the outcome of a report."""

import json
import re
from types import SimpleNamespace

import pytest

from pt2mx.pt2e.cli.doctor_checks import VERSIONS
from tests.neighbours import __main__ as command
from tests.neighbours import run
from tests.neighbours.run import ROOT, Outcome, constraints, name_of, outcome, paths_of
from tests.neighbours.table import ENVIRONMENTS

README = (ROOT / "README.md").read_text()
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_passes[1]"/>
<testcase classname="tests.test_a" name="test_fails"><failure message="no"/></testcase>
<testcase classname="tests.test_a" name="test_fails"><error message="of its fixture"/></testcase>
<testcase classname="" name="tests.test_b"><error message="of an import"/></testcase>
<testcase classname="tests.test_a" name="test_needs_a_gpu"><skipped message="none"/></testcase>
</testsuite></testsuites>"""


def test_constraints_without_the_packages_that_move():
    text = "# pins\ntorch==2.13.0\ntorchao==0.18.0\njax==0.10.2; python_version > '3.10'\ncompressed-tensors==0.20.0\n"
    kept = "# pins\ntorchao==0.18.0\njax==0.10.2; python_version > '3.10'\n"
    assert constraints(text, ("torch==2.14.*", "compressed-tensors")) == kept


def test_every_package_that_moves_is_pinned():
    """A name that `constraints.txt` spells in another way would stay pinned."""
    pinned = {name_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"}
    assert {name_of(text) for environment in ENVIRONMENTS.values() for text in environment.moved} <= pinned


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_has_tests(name):
    assert paths_of(ENVIRONMENTS[name].tests)


def test_a_pattern_without_a_file_is_refused():
    with pytest.raises(ValueError, match=r"no tests are called 'tests/nowhere_\*\.py'"):
        paths_of(("tests/nowhere_*.py",))


def test_the_outcome_of_a_report():
    """A test that fails twice, once in its fixture, is one."""
    failed = ("tests.test_a::test_fails", "tests.test_b")
    assert outcome(REPORT, {"torch": "2.15.0"}) == Outcome({"torch": "2.15.0"}, 1, 1, failed)


def test_versions_that_are_pinned_need_no_environment(monkeypatch):
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    monkeypatch.setattr(run, "venv", SimpleNamespace(create=lambda folder, with_pip: None))
    monkeypatch.setattr(run, "_newest", lambda python, moved: {name: pinned[name] for name in moved})
    monkeypatch.setattr(run, "_call", lambda *command: 1)
    assert run.run(ENVIRONMENTS["torchao"]) == Outcome({"torchao": pinned["torchao"]}, None, None, ())
    (reason,) = run.run(ENVIRONMENTS["openvino"]).failed  # `make test` lacks OpenVINO
    assert reason.startswith("pip finds no versions")


def test_a_run_of_one_environment_keeps_the_other_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "TABLE", tmp_path / "results.md")
    outcomes = {
        ENVIRONMENTS["torch"]: Outcome({"torch": "2.15.0", "torchvision": "0.29.2"}, 90, 2, ()),
        ENVIRONMENTS["transformers"]: Outcome({"transformers": "5.24.0"}, None, None, ()),
        ENVIRONMENTS["onnx"]: Outcome({"onnx": "1.24.0"}, 8, 0, ("tests.test_a::test_fails",)),
    }
    monkeypatch.setattr(command, "run", lambda environment, whole: outcomes[environment])
    assert command.main(["onnx", "--whole"]) == 1
    assert command.main(["transformers", "torch"]) == 0
    told = capsys.readouterr().out
    rows = told[told.rindex("| --- |") :]
    assert "| torch | torch 2.15.0, torchvision 0.29.2 | core | 90 | 0 | 2 |" in rows
    assert re.search(
        r"\| onnx \| onnx 1\.24\.0 \| all \| 8 \| 1 \| 0 \|.*\n\n- onnx: tests\.test_a::test_fails\n$", rows
    )
    with pytest.raises(SystemExit):
        command.main(["tourch"])
    assert "no environment 'tourch'; there are torch-2.14, torch, torchao" in capsys.readouterr().err


def test_the_table_tells_the_results():
    assert command.TABLE.read_text() == command.table(json.loads(command.RESULTS.read_text()))


def test_the_documents_and_doctor_name_the_newest_versions_that_pass():
    """Those of the environments that move torch, and torchao."""
    results = json.loads(command.RESULTS.read_text())
    newest = {}
    for package in ("torch", "torchao"):
        assert not results[package]["failed"]
        newest[package] = ".".join(results[package]["versions"][package].split(".")[:2])
    assert newest == {package: version for package, (_, version) in VERSIONS.items()}
    assert f"(torch {VERSIONS['torch'][0]} to {newest['torch']}, torchao {newest['torchao']})" in README
