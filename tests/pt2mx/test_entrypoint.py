"""What the process `pt2mx` does before torch is imported; each in a process in which torch cannot be."""

import json
import os
import subprocess
import sys

import pytest

import pt2mx
from pt2mx.pt2e.cli.command import COMMANDS

#: the command line of `pt2mx`, without a module
WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
sys.argv = ["/bin/pt2mx", *sys.argv[2:]]
sys.orig_argv = ["python", *sys.argv]
import pt2mx
"""


def run(*arguments, without="torch", env=None):
    command = [sys.executable, "-c", WITHOUT, without, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("arguments", [["--help"], ["-h", "quantize"]])
def test_help_needs_no_torch(arguments):
    result = run(*arguments)
    assert (result.returncode, result.stderr) == (0, "") and all(f"\n    {name}" in result.stdout for name in COMMANDS)
    assert "exit status: 0 done" in result.stdout


def test_version_needs_no_torch():
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"pt2mx {pt2mx.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND is missing"),
        (["quantise"], "did you mean 'quantize'?"),
        (["--versoin"], "did you mean '--version'?"),
        (["recipes", "shwo", "mxfp8"], "did you mean 'show'?"),
        (["quantize", "--model", "minilm"], "give --recipe"),
        (["quantize", "--modle", "minilm"], "did you mean '--model'?"),
    ],
)
def test_a_wrong_command_line_needs_no_torch(arguments, message):
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_the_help_and_the_completion_of_all_commands_need_no_torch():
    for arguments in (["quantize", "--help"], ["recipes", "check", "--help"], ["completion", "fish"]):
        result = run(*arguments)
        assert result.returncode == 0 and result.stdout and result.stderr == ""


def test_the_first_stage_is_to_import_torch():
    result = run("quantize", "--model", "minilm", "--recipe", "mxfp8")
    assert result.stderr.splitlines()[0].endswith(" s] import torch") and "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_broken_torch_is_one_line(error, tmp_path):
    (tmp_path / "torch.py").write_text(f"raise {error}('libcudart.so: cannot open\\n shared object')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    result = run("formats", without="nothing", env=env)
    assert (result.returncode, result.stdout) == (2, "")
    reason = f"{error}: libcudart.so: cannot open shared object"
    assert result.stderr == f"pt2mx: error: torch cannot be imported ({reason}): `pt2mx doctor` says how to repair it\n"
    assert "Traceback" in run("formats", "--traceback", without="nothing", env=env).stderr


@pytest.mark.compiled
def test_a_broken_package_is_one_line():
    result = run("slice", "none", "--recipe", "mxfp4", "--output", "o.pt2", without="nothing")
    assert result.returncode == 2 and "doctor" not in result.stderr
    code = WITHOUT + "from pt2mx.pt2e.cli.command import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "torchao", "recipes", "check", "mxfp4"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "torchao" in result.stderr and result.stderr.count("\n") <= 2
    assert result.stderr.endswith("; `pt2mx doctor` says how to repair it\n")


@pytest.mark.compiled
def test_the_garbage_collector_runs_rarely_in_the_process_of_a_command(run_python):
    code = "import atexit, gc\natexit.register(lambda: print(gc.get_threshold(), gc.get_freeze_count() > 0))\n"
    result = subprocess.run([sys.executable, "-c", code + WITHOUT, "torch", "formats"], capture_output=True, text=True)
    assert result.stdout == "(50000, 20, 20) True\n"
    assert run_python("import gc, pt2mx\nprint(gc.get_threshold()[0] < 50000)", env=os.environ) == "True\n"


def test_texts_name_no_stage():
    assert " s] " not in run("formats").stderr


def test_a_card_needs_no_torch(tmp_path):
    (tmp_path / "program.pt2").write_bytes(bytes(10))
    (tmp_path / "recipe.yaml").write_text("global: {weight: mxfp8}\n")
    (tmp_path / "config.json").write_text("{}")
    result = run("card", str(tmp_path), "--name", "me/it")
    assert (result.returncode, result.stderr) == (0, "") and "# me/it\n" in result.stdout


@pytest.mark.compiled
def test_doctor_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    result = run("doctor", "--json", without="nothing", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    report = json.loads(result.stdout)
    status = {row["name"]: row["status"] for row in report["checks"]}
    assert result.returncode == 1 and report["flow_can_run"] is False
    assert (status["Python"], status["numpy"], status["torch"]) == ("ok", "ok", "broken")
    assert {status[name] for name in ("torchao", "CPU kernels", "GPU", "[vision]")} == {"unknown"}
    assert "Traceback" not in result.stderr


@pytest.mark.compiled
def test_another_process_is_left_alone(run_python):
    code = "import sys\nsys.argv = ['net.py', '--help']\nimport pt2mx\nprint('went on')"
    assert run_python(code, env=os.environ) == "went on\n"


@pytest.mark.parametrize(
    ("closed", "status", "printed"),
    [("2>&-", 0, ('"shell": "bash"', "")), (">&-", 2, ("", "pt2mx: error: stdout is closed: there is no place"))],
)
def test_streams_that_are_closed(closed, status, printed):
    arguments = [sys.executable, "-c", WITHOUT, "torch", "completion", "bash", "--json"]
    result = subprocess.run(["bash", "-c", f'exec "$0" "$@" {closed}', *arguments], capture_output=True, text=True)
    assert result.returncode == status and all(map(str.__contains__, (result.stdout, result.stderr), printed))
    assert not result.stdout or "complete -o bashdefault" in json.loads(result.stdout)["script"]
