"""Virtual environments with packages that the environment of the tests lacks, or has in other versions."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def environment(folder: Path, *requirements: str) -> Path:
    """Make an environment that sees the packages of this one, install requirements into it, and return its python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    (Path(packages) / "shared.pth").write_text(sysconfig.get_path("purelib"))
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *requirements]
    subprocess.run(install, check=True, stdout=sys.stderr)
    return python
