"""Run the notebooks, and compare their outputs with those that they hold; `python -m tests.notebooks [NAME ...]` stores
them."""

import math
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.documents import NOTEBOOKS

#: by how much a number may differ between processors: as a share, and at all
TOLERANCE, LEAST = 0.05, 1e-3
_NUMBER = re.compile(r"(-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)")
#: times and temporary folders
_VOLATILE = re.compile(r"[\d.]+ m?s\b|\S*/tmp\w{8}/")


class ThisInterpreter(AsyncKernelManager):
    """A kernel of the running interpreter, whichever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="this interpreter", language="python")


def read(path: Path) -> NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(path: Path, folder: Path) -> NotebookNode:
    """Return a notebook as it is after its cells ran in a folder. Progress on stderr is left out."""
    notebook = read(path)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=600, resources=resources, kernel_manager_class=ThisInterpreter, coalesce_streams=True
    )
    with tempfile.TemporaryDirectory() as profile:  # IPython would keep its profile in the home of the user
        client.execute(env={**os.environ, "IPYTHONDIR": profile})
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)  # times
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def printed(notebook: NotebookNode) -> str:
    """Return what the cells print."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def shown(cell: NotebookNode) -> str:
    """Return what a cell prints and shows: texts, and pictures as their source."""
    texts: list[str] = []
    for output in cell.outputs:
        data = {"stream": output.text} if output.output_type == "stream" else output.data
        texts += (data[kind] for kind in sorted(data))
    return "\n".join(texts)


def agree(text: str, other: str) -> bool:
    """Return whether two texts have the same words, and numbers that differ by no more than `TOLERANCE` or
    `LEAST`."""
    parts, others = (_NUMBER.split(" ".join(_VOLATILE.sub("", t).split())) for t in (text, other))
    if parts[::2] != others[::2]:
        return False
    numbers = zip(*([float(one.replace(",", "")) for one in ps[1::2]] for ps in (parts, others)), strict=True)
    return all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=LEAST) for a, b in numbers)


def main(names: list[str]) -> None:
    for path in (path for path in NOTEBOOKS if not names or path.stem in names):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        notebook.metadata.language_info = {"name": "python"}  # without its version
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
