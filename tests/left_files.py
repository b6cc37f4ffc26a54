"""Files that tests leave in the folder of temporary files, in the checkout and in the home of the user."""

import atexit
import getpass
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: what libraries keep there until a process ends: multiprocessing, onnxruntime, Inductor
_KEPT = ("pymp-", ".ses", "torchinductor_")
#: what tools write into a checkout, whatever the tests do
_CACHES = ("__pycache__/", ".venv/", "build/", "dist/", "*.egg-info/", ".pytest_cache/", ".ruff_cache/", ".mypy_cache/")


def use_own_temporary_folder() -> None:
    """Let this process, and those that it starts, make temporary files in a folder that goes when it ends: what appears
    there is of its tests, not of another program. Inductor's cache and pytest's folders stay where they are."""
    shared, inductor = tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", shared)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(shared, inductor))
    process, folder = os.getpid(), tempfile.mkdtemp(prefix="pt2mx-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # where Inductor keeps precompiled headers, whatever its cache: each process would compile them again, for 6 seconds
    os.makedirs(os.path.join(shared, inductor), exist_ok=True)
    os.symlink(os.path.join(shared, inductor), os.path.join(folder, inductor))

    def remove() -> None:
        if os.getpid() == process:  # not in a fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def temporary_files() -> set[str]:
    """Return the names of the files and folders in this process's folder of temporary files."""
    return {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(_KEPT)}


def files_of_the_user() -> set[str]:
    """Return what lies in the user's home, and the files of the checkout that git does not know, also those that
    .gitignore names; caches are left out. Where there is no repository, the checkout is not looked at."""
    exclude = [f"--exclude={name}" for name in _CACHES]
    unknown = []
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "--others", *exclude], cwd=ROOT, capture_output=True, text=True)
        unknown = listed.stdout.splitlines()
    home = Path.home()
    entries = home.iterdir() if home.is_dir() else ()
    return {str(entry) for entry in entries if entry.name != ".cache"} | {str(ROOT / name) for name in unknown}
