"""Runs tests of the C++ kernels in a build that checks addresses and undefined behaviour.

    python -m tests.sanitize FOLDER [arguments of pytest, by default the tests of the kernels and operators]

FOLDER keeps the library, so that a second run builds what changed. The package builds it as it always does: a script
in place of the compiler adds the options. The compiler must be GCC, whose run-time libraries are loaded before those of
Python. torch and Python are not checked, and neither are leaks, of which Python has many by design.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: after the package's options: optimization would take three times as long to compile; the first finding ends a process
OPTIONS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")
TESTS = ("tests/pt2mx/kernels/cpu", "tests/pt2mx/ops", "-k", "not inductor and not compile")


def runtimes(compiler: str) -> list[str]:
    """Return the paths of the compiler's run-time libraries."""
    paths = []
    if shutil.which(compiler) is None:
        sys.exit(f"there is no {compiler}: name a g++ with its sanitizers in CXX")
    for name in RUNTIMES:
        command = [compiler, f"-print-file-name={name}"]
        paths.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not os.path.isabs(paths[-1]):
            sys.exit(f"{compiler} has no {name}: name a g++ with its sanitizers in CXX")
    return paths


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    folder, *options = arguments
    place, compiler = Path(folder).absolute(), os.environ.get("CXX", "g++")
    place.mkdir(parents=True, exist_ok=True)
    script = place / "compiler"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" {OPTIONS}\n', encoding="utf-8")
    script.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(script),
        "TORCH_EXTENSIONS_DIR": str(place / "extensions"),
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": " ".join(runtimes(compiler)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # pytest keeps what Python prints, and leaves the sanitizers' reports on stderr
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", *(options or TESTS)]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
