"""The documents and notebooks, and the code in them; `python -m tests.documents` has mypy check that code.

mypy sees the code as a user's, from a folder outside the checkout: it finds pt2mx where it is installed.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: folders of sources; `pt2mx/ops/README.md` and the like are found in them
FOLDERS = ("pt2mx", "fx", "pt2e", "configs", "tests", "notebooks")
READMES = [ROOT / "README.md"] + sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md"))
DOCUMENTS = [
    *READMES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "pt2e" / "checkpoints" / "serving.md",
    ROOT / "pt2e" / "optimize" / "training.md",
    ROOT / "notebooks" / "from_other_libraries.md",
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: code in a document is short: its functions have no annotations (mypy checks them nonetheless), and packages
#: other than pt2mx may have no types
_FLAGS = (
    *("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache" / "documents")),
    *("--allow-untyped-defs", "--disable-error-code=import-untyped"),
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[tuple[int, str, str]]:
    """(lines above it, the words after the language, text) of each code block in `language`."""
    text = path.read_text()
    matches = re.finditer(rf"^```{language}\b(.*)\n((?s:.*?))^```$", text, re.MULTILINE)
    return [(text.count("\n", 0, match.start(2)), match[1].strip(), match[2]) for match in matches]


def cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def programs() -> dict[str, str]:
    """name of a module -> program: a block of a document, its lines numbered as there, or a notebook's cells."""
    codes = {name_of(path): "\n\n".join(cells(path)) for path in NOTEBOOKS}
    for path in DOCUMENTS:
        codes |= {f"{name_of(path)}:{line}": "\n" * line + code for line, _, code in blocks(path, "python")}
    return {re.sub(r"\W", "_", name): code for name, code in codes.items()}


def check_types(programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """mypy over programs, with the project's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        for name, code in programs.items():
            (Path(folder) / f"{name}.py").write_text(code)
        command = [sys.executable, "-m", "mypy", *_FLAGS, "."]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)


if __name__ == "__main__":
    result = check_types(programs())
    print(result.stdout, result.stderr, sep="", end="")
    sys.exit(result.returncode)
