"""Virtual environments with packages that the environment of the tests lacks, or has in other versions."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: arguments of `pip install` for the versions that pt2mx is tested with
PINNED = ("-c", str(ROOT / "constraints.txt"))


def environment(folder: Path, *arguments: str) -> Path:
    """Make an environment that sees the packages of this one, and return its python.

    Args:
        folder: the folder to make it in.
        *arguments: the arguments of `pip install`.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    (Path(packages) / "shared.pth").write_text(sysconfig.get_path("purelib"))
    install = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(install, check=True, stdout=sys.stderr)
    return python


def python_with(packages: tuple[str, ...], variable: str, folder: Path) -> str:
    """Return a python that has some packages: this one, the one that an environment variable names, or a new one.

    Args:
        packages: names to import and to install.
        variable: the name of the environment variable.
        folder: the folder of a new environment.
    """
    if all(importlib.util.find_spec(package) for package in packages):
        return sys.executable
    if path := os.environ.get(variable):
        return path
    try:
        return str(environment(folder, *PINNED, *packages))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{' and '.join(packages)} cannot be installed here: {error}")


def run_python(python: str, *arguments: str, cwd: Path) -> str:
    """Run a python with the repository in its path, and return what it prints."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run([python, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=1800)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout
