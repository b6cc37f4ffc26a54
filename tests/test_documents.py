"""README, CONTRIBUTING and the notebooks say what is so: their code runs, and what they name exists."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import pt2mx
from pt2mx import compat
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.pt2e.cli import command
from pt2mx.pt2e.quantizer import recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def blocks(language: str) -> list[tuple[int, str]]:
    """(lines of the README above it, text) of each code block in `language`."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start(1)), match[1]) for match in found]


def test_readme_code_runs(tmp_path, monkeypatch, compiler):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for line, code in blocks("python"):
        exec(compile("\n" * line + code, ROOT / "README.md", "exec"), namespace)
    x = torch.randn(3, 64)  # another batch size than the README's
    assert torch.equal(namespace["reloaded"](x), namespace["converted"](x))
    assert namespace["report"].to_table().splitlines()[-1] in README


def test_readme_names_every_part_of_the_flow():
    code = "".join(text for _, text in blocks("python"))
    names = {name for name in pt2mx.__all__ if name.endswith(("_pt2e", "_mx", "_report"))}
    assert len(names) == 7 and all(f"pt2mx.{name}(" in code for name in names)
    setters = [name for name in dir(pt2mx.MXQuantizer) if name.startswith("set_")]
    assert len(setters) == 10 and all(f".{name}(" in code for name in setters)


def test_readme_recipes(tmp_path):
    section = README.partition("## Recipes")[2].partition("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == recipe.names()
    (tmp_path / "recipe.yaml").write_text(blocks("yaml")[0][1])
    settings = recipe.read(tmp_path / "recipe.yaml")
    assert len(settings) == len(yaml.safe_load(blocks("yaml")[0][1])) - 1  # all but the description


def test_readme_command_line(capsys):
    command.main(["formats"])
    assert capsys.readouterr().out in README
    with pytest.raises(SystemExit):
        command.main(["quantize", "--help"])
    options = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
    section = README.partition("## Command line")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `(--[\w-]+)`", section, re.MULTILINE)) == options


def test_readme_packages(capsys):
    options = set()
    for name in ("compile", "run"):
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        options |= set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
    section = README.partition("### Packages of AOTInductor")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `(--[\w-]+)`", section, re.MULTILINE)) == options


def test_readme_tables_of_modes_and_presets():
    assert compat.table() in README
    section = README.partition("## Formats")[2].partition("## ")[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert named == {*SCALE_MODES, *ROUNDINGS}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_what_a_document_names_exists(document):
    text = (ROOT / document).read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:`|^)make (\w+)", text, re.MULTILINE))
    assert named and named <= set(targets)
    paths = re.findall(r"`((?:pt2mx|fx|pt2e|configs|tests|notebooks|\.ci)/[\w./]*)`|\]\((?!http)([^)]+)\)", text)
    missing = [path for pair in paths for path in pair if path and not (ROOT / path).exists()]
    assert paths and not missing
    extras = re.findall(r"\[(\w+)\]'", text)
    assert all(re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for extra in extras)


class ThisInterpreter(AsyncKernelManager):
    """A kernel of the running interpreter, whichever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="this interpreter", language="python")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "store it without outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=resources, kernel_manager_class=ThisInterpreter).execute()
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not list(tmp_path.iterdir()), "it leaves files behind"


def test_notebooks_are_numbered():
    assert NOTEBOOKS
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{i:02}_" for i in range(1, len(NOTEBOOKS) + 1)]
