"""Virtual environments with packages that the environment of the tests lacks, or has in other versions."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

#: arguments of `pip install` for the versions that pt2mx is tested with
PINNED = ("-c", str(Path(__file__).parents[1] / "constraints.txt"))


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
