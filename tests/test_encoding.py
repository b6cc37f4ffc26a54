"""Texts are UTF-8, whatever the locale of the process."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for folder in ("pt2mx", "fx", "pt2e") for path in sorted((ROOT / folder).rglob("*.py"))]
#: what opens a text, by the encoding of the locale where none is named
METHODS = {"read_text", "write_text"}
OPENS = {"open", "fdopen", "TextIOWrapper", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
#: owners of functions called `open` that open no text
OTHERS = {"wave", "pillow", "Image", "zipfile", "archive", "upgraded", "gzip", "safetensors", "shards", "self"}
#: functions of `subprocess`, which reads the output as text with these
PROCESSES, AS_TEXT = {"run", "Popen", "check_output"}, {"text", "universal_newlines"}
TEXT = "naïve Größe 日本語\n"


def by_the_locale(tree: ast.AST) -> list[int]:
    """Return the lines of a module that read or write a text and name no encoding."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and not _is_fit(node)]


def _is_fit(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if is_method else getattr(call.func, "id", "")
    owner = getattr(call.func.value, "id", getattr(call.func.value, "attr", "")) if is_method else ""
    if isinstance(given.get("encoding"), ast.Constant) and given["encoding"].value == "utf-8":
        return True
    if name in METHODS:
        return not is_method  # the package's own functions of that name
    if (owner, name) == ("os", "open"):
        return True
    if name in OPENS and owner not in OTHERS:
        modes = [one.value for one in (*call.args, given.get("mode")) if isinstance(one, ast.Constant)]
        return any(isinstance(mode, str) and "b" in mode for mode in modes) or (
            name.endswith("TemporaryFile") and not modes
        )
    return not (name in PROCESSES and AS_TEXT & given.keys())


def test_every_text_names_its_encoding():
    lines = {path: by_the_locale(ast.parse(path.read_text(encoding="utf-8"))) for path in FILES}
    assert not [f"{path.relative_to(ROOT)}:{line}" for path, found in lines.items() for line in found]


@pytest.mark.parametrize(
    ("code", "fits"),
    [
        ("open(a)", False),
        ("open(a, 'w')", False),
        ("open(a, mode='rb')", True),
        ("path.open()", False),
        ("path.read_text()", False),
        ("path.read_text(encoding='ascii')", False),
        ("path.read_text(encoding='utf-8')", True),
        ("path.write_text(text, encoding='utf-8')", True),
        ("os.fdopen(handle, 'wb')", True),
        ("os.fdopen(handle, 'w')", False),
        ("subprocess.run(command, text=True)", False),
        ("subprocess.run(command)", True),
        ("wave.open(path)", True),
    ],
)
def test_what_names_no_encoding(code, fits):
    assert by_the_locale(ast.parse(code)) == ([] if fits else [1])


READS = """
import sys
from pathlib import Path
from pt2mx import MXQuantizer
from pt2mx.pt2e.models.checkpoint_files import read_json
from pt2mx.pt2e.cli.command import main
from pt2mx.entrypoint import start
from pt2mx.pt2e.language.texts import built_in_text, read_text
from pt2mx.pt2e.files.output import write_text
from pt2mx.pt2e.quantizer.shipped import tasks
folder = Path(sys.argv[1])
text = read_text(folder / "text.txt")
write_text(text, folder / "again.txt")
assert read_json(folder / "config.json") == {"name": text}
assert len(built_in_text()) > 1000 and tasks()
MXQuantizer.from_recipe(folder / "recipe.yaml").to_recipe(folder / "again.yaml")
command = ["recipes", "show", str(folder / "recipe.yaml")]
start(command)
assert main(command) == 0
"""


@pytest.mark.compiled
def test_texts_in_a_locale_of_ascii(tmp_path):
    """What is read and written is the text; what a command prints has escapes where the locale lacks a letter."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "config.json").write_text(f'{{"name": "{TEXT[:-1]}\\n"}}', encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(f"description: {TEXT}global: {{weight: mxfp8}}\n", encoding="utf-8")
    names = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    # by a path that this locale can decode, and without `site`, which would read that of an editable install
    (tmp_path / "root").symlink_to(ROOT)
    env = {**os.environ, **names, "PYTHONPATH": os.pathsep.join([str(tmp_path / "root"), *sys.path])}
    command = [sys.executable, "-S", "-c", READS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="ascii", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.txt").read_bytes() == TEXT.encode()
    assert TEXT.strip().encode("ascii", "backslashreplace").decode() in done.stdout
