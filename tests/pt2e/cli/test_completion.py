import shutil
import subprocess

import pytest

from pt2mx.pt2e.cli.command import COMMANDS, main
from pt2mx.pt2e.quantizer import recipe

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts():
    """The scripts of all shells."""
    from pt2mx.pt2e.cli.completion import _SHELLS

    return {name: make() for name, make in _SHELLS.items()}


def test_the_command_prints_the_script(scripts, capsys):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts["bash"] + "\n"


#: words of the command line, the last one incomplete -> its completions
LINES = [
    (["qu"], ["quantize"]),
    ([""], list(COMMANDS)),
    (["--v"], ["--version"]),
    (["quantize", "--de"], ["--device"]),
    (["quantize", "--model", "net.py:make", "--device", ""], ["cpu", "cuda"]),
    (["quantize", "--recipe", "mxfp6"], [name for name in recipe.names() if name.startswith("mxfp6")]),
    (["quantize", "--output", ""], []),
    (["compare", "minilm", "--recipes", "encoder_b"], ["encoder_balanced", "encoder_best"]),
    (["compile", ""], []),
    (["recipes", ""], ["list", "show", "check", "schema"]),
    (["recipes", "check", "--m"], ["--model"]),
    (["completion", ""], list(SHELLS)),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("words", "expected"), LINES)
def test_bash(words, expected, scripts):
    code = f'{scripts["bash"]}\nCOMP_WORDS=(pt2mx "$@"); COMP_CWORD=$#; _pt2mx; printf \'%s\\n\' "${{COMPREPLY[@]}}"'
    result = subprocess.run(["bash", "-c", code, "-", *words], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "" and result.stdout.split() == expected


def test_zsh_runs_what_bash_does(scripts):
    assert scripts["zsh"] == f"autoload -U +X bashcompinit && bashcompinit\n{scripts['bash']}"


def test_fish(scripts):
    lines = scripts["fish"].splitlines()
    assert all(line.startswith("complete -c pt2mx -n '") for line in lines)
    assert all(any(f" -f -a {name} " in line for line in lines) for name in COMMANDS)
    (device,) = (line for line in lines if "from compile'" in line and " -l device " in line)
    assert " -x -a 'cpu cuda' " in device
