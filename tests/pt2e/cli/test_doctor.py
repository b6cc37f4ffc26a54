import json

import pytest

from pt2mx.pt2e.cli import doctor
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.doctor_checks import CHECKS, Check, NotNeeded


def fails(error):
    def look():
        raise error

    return look


@pytest.fixture
def check(monkeypatch, capsys):
    """Runs the command with some checks: (status, what it says of the first, the text)."""

    def run(*checks):
        monkeypatch.setattr(doctor, "CHECKS", {"group": checks})
        status = main(["doctor", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert main(["doctor"]) == status and found["flow_can_run"] == (status == 0)
        return status, found["checks"][0], capsys.readouterr().out.splitlines()

    return run


def test_what_is_there(check):
    status, row, lines = check(Check("g++", lambda: "12.2", "speed", "apt-get install g++"))
    assert status == 0 and (row["status"], row["found"], row["mend"]) == ("ok", "12.2", None)
    assert lines[1].split() == ["ok", "g++", "12.2"] and lines[2] == "the flow can run; nothing of 1 missing"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'x.y'", name="x.y"), "x is not installed"),
        (OSError("libx.so:\n  cannot open shared object file"), "libx.so: cannot open shared object file"),
        (RuntimeError("1.0 is older than 2.11: pip install x"), "1.0 is older than 2.11"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (RuntimeError("long " * 100), ("long " * 40) + " ..."),
    ],
)
def test_what_is_missing_or_broken_comes_with_the_command_that_mends_it(error, reason, check):
    status, row, lines = check(Check("x", fails(error), "speed", "pip install x"))
    assert status == 0 and (row["status"], row["found"], row["mend"]) == ("missing", reason, "pip install x")
    assert lines[2].strip() == "for speed: pip install x" and lines[-1] == "the flow can run; 1 of 1 missing"


def test_without_what_the_flow_needs_the_status_is_1(check):
    status, row, lines = check(Check("x", fails(ImportError("broken")), "the flow", "pip install x", needed=True))
    assert status == 1 and row["needed"] and lines[-1] == "the flow cannot run; 1 of 1 missing"


def test_what_is_of_no_use_here_is_not_missing(check):
    status, row, lines = check(Check("GPU", fails(NotNeeded("no GPU")), "speed", "buy one"))
    assert status == 0 and (row["status"], row["mend"]) == ("not needed", None)
    assert lines[-1] == "the flow can run; nothing of 1 missing"


def test_here(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert list(found) == [check.name for checks in CHECKS.values() for check in checks]
    assert all(row["status"] == "ok" for row in found.values() if row["needed"])
