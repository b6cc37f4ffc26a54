"""Runs tests of the C++ kernels on an emulated AArch64 processor.

    dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user g++-aarch64-linux-gnu
    python -m tests.aarch64 FOLDER [arguments of pytest, by default the tests of the kernels]

The first run fills FOLDER with Debian's Python and PyPI's torch for AArch64, about 1 GB. A cross-compiler builds the
kernels; qemu runs Python, many times slower than this machine. torch is 2.10, the last one whose build for AArch64 on
PyPI needs no CUDA.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

COMPILER = "/usr/bin/aarch64-linux-gnu-g++"
#: installed without what they ask for, which is therefore here, too
PACKAGES = """
torch==2.10.0 torchao==0.18.0 numpy sympy mpmath networkx jinja2 markupsafe filelock typing_extensions fsspec
setuptools pyyaml ml_dtypes transformers safetensors tqdm regex huggingface_hub tokenizers packaging pytest pluggy
iniconfig pygments
""".split()
LIBRARIES = ("libstdc++6", "libgomp1")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
#: without those that start an interpreter of their own for other x86-64 processors
TESTS = ("tests/pt2mx/kernels/cpu", "-k", "not other_processors and not test_prebuilt")


def install_python(folder: Path) -> Path:
    """Unpack Debian's Python for AArch64, and all that it depends on; return its path."""
    root, packages = folder / "root", folder / "packages"
    packages.mkdir(parents=True)
    os.chmod(packages, 0o777)  # apt's own user writes to it
    command = ["apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks"]
    command += ["--no-replaces", "--no-enhances", *(f"{name}:arm64" for name in ("python3", *LIBRARIES))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = sorted({line for line in lines if line.endswith(":arm64") and line[0] not in " <|"})
    subprocess.run(["apt-get", "download", "--quiet", *names], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=(folder / "files.tar").open("wb"), check=True)
        # follows the link from lib to usr/lib, as an installed system has it
        (root / "usr" / "lib").mkdir(parents=True, exist_ok=True)
        if not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")
        tar = ["tar", "--extract", "--keep-directory-symlink", "--file", folder / "files.tar", "--directory", root]
        subprocess.run(tar, check=True)
    (folder / "files.tar").unlink()
    return python_of(folder)


def python_of(folder: Path) -> Path:
    """Return the path of the Python of a folder."""
    return next((folder / "root" / "usr" / "bin").glob("python3.*[0-9]"))


def install_packages(folder: Path, version: str) -> None:
    """Unpack PyPI's packages for a version of Python such as "3.11"."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={version}", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*command, f"--dest={folder / 'wheels'}", *PACKAGES], check=True)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
        wheel.unlink()


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    folder, *options = arguments
    place = Path(folder).absolute()
    if not (place / "root").exists():
        install_packages(place, install_python(place).name.removeprefix("python"))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{place / 'site'}:{os.getcwd()}",
        "CXX": COMPILER,
        "TORCH_EXTENSIONS_DIR": str(place / "extensions"),
        "OMP_NUM_THREADS": "1",
    }
    command = ["qemu-aarch64", "-L", place / "root", python_of(place), "-m", "pytest", "-q", "-o", "addopts="]
    marks = "not slow and not compiled and not cuda"
    command += ["-p", "no:cacheprovider", "-W", "ignore", "-m", marks, *(options or TESTS)]
    return subprocess.run([str(part) for part in command], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
