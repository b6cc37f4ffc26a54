"""The patches of `notebooks/upstream/` apply to the files of the installed torch, and the tests of block-scaled matmuls
pass with the patched torch in place of their reference."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "notebooks/upstream").glob("*.patch"))
#: tests, and how many of them run
PATCHED = {
    "tests/upstream/test_patched_torch.py": 11,
    "tests/pt2e/aten/test_lower.py -k scaled or finite or subgraphs or exact": 22,
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with links to the installed torch, and copies of its files that the patches change."""
    folder, installed = tmp_path_factory.mktemp("patched"), Path(torch.__file__).parent
    shutil.copytree(installed, folder / "torch", copy_function=os.symlink)
    for name in re.findall(r"^--- a/(\S+)$", "".join(path.read_text() for path in PATCHES), re.MULTILINE):
        (folder / name).unlink()
        shutil.copyfile(installed.parent / name, folder / name)
    for path in PATCHES:
        subprocess.run(["patch", "-p1", "--fuzz=0", "-i", path], cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("patch"), reason="needs the program patch")
@pytest.mark.parametrize("arguments", PATCHED)
def test_passes_with_the_patched_torch(arguments, patched):
    path, _, chosen = arguments.partition(" -k ")
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.upstream.no_reference", "-m", "slow or not slow"]
    paths = os.pathsep.join(map(str, (patched, ROOT, ROOT / "tests/conformance")))
    command, env = [sys.executable, "-m", "pytest", *options, "-k", chosen, path], {**os.environ, "PYTHONPATH": paths}
    finished = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert f"\n{PATCHED[arguments]} passed" in finished.stdout, finished.stdout[-300:]
