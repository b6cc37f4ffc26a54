"""The browser of the tests."""

import pytest

from tests import browser
from tests.browser import Browser


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("exit 3", "the browser has ended"),
        ("sleep 60", "the browser does not answer"),
        ("""while printf '{"method": "busy"}\\0' >&4; do sleep 0.01; done""", "the browser does not answer"),
    ],
)
def test_a_browser_that_does_not_answer_is_waited_for_no_longer(does, message, tmp_path, monkeypatch):
    launcher = tmp_path / "chromium"
    launcher.write_text(f"#!/bin/sh\n{does}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(browser, "CHROMIUM", launcher)
    monkeypatch.setattr(browser, "_SECONDS", 0.2)
    with pytest.raises(AssertionError, match=message), Browser(tmp_path) as ended:
        ended.send("Target.getTargets")
