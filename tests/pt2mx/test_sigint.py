import signal
import subprocess
import sys

import pytest

from pt2mx import sigint
from pt2mx.sigint import record_sigint

#: loads the module by its file, as the first import of a process with other arguments does, and is interrupted
INTERRUPTED = """
import importlib.util, signal, sys
sys.argv, sys.orig_argv = [arguments.split(" ") for arguments in sys.argv[2:]]
heavy = set(sys.modules)
spec = importlib.util.spec_from_file_location("first", {file!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
assert not {{"torch", "numpy", "pt2mx"}} & (set(sys.modules) - heavy)
signal.raise_signal(signal.SIGINT)
print("went on")
"""
COMMANDS = [
    ("/bin/pt2mx formats", "python /bin/pt2mx formats"),
    ("pt2mx.exe", "pt2mx.exe"),
    ("-m formats", "python -W ignore -m pt2mx formats"),
    ("-m", "python -mpt2mx"),
]
OTHERS = [("net.py pt2mx", "python net.py pt2mx"), ("-m pt2mx", "python -m pytest pt2mx"), ("", "python")]


def interrupted(arguments, before=""):
    code = before + INTERRUPTED.format(file=sigint.__file__)
    return subprocess.run([sys.executable, "-c", code, "-", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_the_command_ends_with_one_line(arguments):
    result = interrupted(arguments)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "pt2mx: interrupted\n")


@pytest.mark.parametrize("arguments", OTHERS)
def test_other_programs_are_left_alone(arguments):
    assert "KeyboardInterrupt" in interrupted(arguments).stderr


@pytest.mark.parametrize("arguments", [COMMANDS[0], OTHERS[0]])
def test_a_process_that_ignores_interrupts_goes_on(arguments):
    result = interrupted(arguments, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "went on\n", "")


def test_ignored_interrupts_are_not_noted():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with record_sigint() as seen:
            signal.raise_signal(signal.SIGINT)
        assert seen == [] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_noted_interrupts():
    with record_sigint() as seen:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):  # the previous handler is back
        signal.raise_signal(signal.SIGINT)
