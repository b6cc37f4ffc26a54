import json
import shutil
import subprocess

import pytest

from pt2mx.pt2e.cli.command import COMMANDS, main
from pt2mx.pt2e.quantizer import recipe

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def script(capsys):
    def printed(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return printed


#: words of the command line, the last one incomplete -> its completions
LINES = [
    (["qu"], ["quantize"]),
    ([""], list(COMMANDS)),
    (["--v"], ["--version"]),
    (["quantize", "--de"], ["--device"]),
    (["quantize", "--model", "net.py:make", "--device", ""], ["cpu", "cuda"]),
    (["quantize", "--recipe", "mxfp6"], [name for name in recipe.names() if name.startswith("mxfp6")]),
    (["quantize", "--output", ""], ["a file"]),
    (["compare", "minilm", "--recipes", "encoder_b"], ["encoder_balanced", "encoder_best"]),
    (["compile", ""], ["a file"]),
    (["recipes", ""], ["list", "show", "check", "schema"]),
    (["recipes", "check", "--m"], ["--model"]),
    (["completion", ""], list(SHELLS)),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("words", "expected"), LINES)
def test_bash(words, expected, script, tmp_path):
    (tmp_path / "a file").touch()
    call = 'COMP_WORDS=(pt2mx "$@"); COMP_CWORD=$#; _shtab_pt2mx; printf \'%s\\n\' "${COMPREPLY[@]}"'
    code = f"{script('bash')}\n{call}"
    result = subprocess.run(["bash", "-c", code, "-", *words], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.splitlines() == expected


def test_other_shells(script):
    assert script("zsh").startswith("#compdef pt2mx")
    lines = script("fish").splitlines()
    assert all(any(f" -a {name} " in line for line in lines) for name in COMMANDS)
    (device,) = (line for line in lines if "using compile'" in line and " -l device " in line)
    assert '"cpu cuda"' in device


def test_json(capsys):
    assert main(["completion", "bash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shell"] == "bash"
