"""`python -m tests.headers` compiles each C++ header alone, for every instruction set that the library is built for.

A header that includes what it uses can be read, moved and included in any order.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch._inductor import cpp_builder
from torch.utils.cpp_extension import include_paths

from pt2mx.cpp import library
from pt2mx.kernels.cpu import build


def errors(headers: Iterable[Path], capabilities: Iterable[str] = ("DEFAULT", "AVX2", "AVX512")) -> list[str]:
    """Return the compiler's messages for the headers that do not compile alone."""
    compiler = cpp_builder.get_cpp_compiler()
    folders = [f"-I{path}" for path in (Path(build.SOURCES[0]).parent, *include_paths())]

    def error(case: tuple[Path, str]) -> str:
        header, capability = case
        flags = (
            *build.flags_of(capability),
            "-fvisibility=hidden",
            library.TARGET,
            *folders,
            "-fsyntax-only",
            "-include",
            str(header),
        )
        command = [compiler, *flags, "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace").stderr

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [text for text in threads.map(error, itertools.product(headers, capabilities)) if text]


if __name__ == "__main__":
    headers = [Path(path) for path in (*build.HEADERS, *library.HEADERS) if path.endswith(".h")]
    sys.exit("".join(errors(dict.fromkeys(headers))) or None)
