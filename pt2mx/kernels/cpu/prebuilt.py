"""Build the C++ kernels for a wheel, so that a machine that installs it needs no compiler.

    python -m pt2mx.kernels.cpu.prebuilt FOLDER

builds one library for each instruction set of `INSTRUCTION_SETS`, which `build` chooses among by the processor, and
prints the platform tag of the wheel. Matrix instructions are in the libraries, too: the kernels ask the processor for
them. `make wheel` makes the whole wheel.
"""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pt2mx.errors import MXError
from pt2mx.kernels.cpu import build

#: the instruction sets of the wheel's libraries, as `torch.backends.cpu.get_cpu_capability` names them
INSTRUCTION_SETS = ("AVX2", "AVX512")
_OLDEST_GLIBC = 17  # the minor version of manylinux2014, the oldest that pip knows by its version


def build_libraries(folder: Path) -> list[Path]:
    """Build a library for each instruction set into a folder.

    Args:
        folder: the folder, which is made where it is missing.

    Returns:
        The paths of the libraries.

    Raises:
        MXError: on another machine than x86-64 Linux, and where they cannot be compiled.
    """
    from torch._inductor import cpp_builder

    if (system := (platform.system(), platform.machine())) != ("Linux", "x86_64"):
        raise MXError(f"cannot build the libraries of a wheel on {' '.join(system)}: allowed is Linux x86_64")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / build.library_name(name) for name in INSTRUCTION_SETS]
    compiler = cpp_builder.get_cpp_compiler()

    def build_one(name: str, path: Path) -> None:
        build.compile_library(compiler, (*build.flags_of(name), *build.SOURCES), path)

    with ThreadPoolExecutor() as threads:
        try:
            list(threads.map(build_one, INSTRUCTION_SETS, paths))
        except RuntimeError as error:
            raise MXError(str(error)) from None
    return paths


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return the platform tag of a wheel (PEP 600): it names the newest version of glibc that a library asks for.

    Args:
        libraries: shared libraries for x86-64.

    Returns:
        A tag such as "manylinux_2_17_x86_64".
    """
    versions = [int(minor) for path in libraries for minor in re.findall(rb"\0GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max([_OLDEST_GLIBC, *versions])}_x86_64"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the libraries are written")
    print(platform_tag(build_libraries(parser.parse_args(arguments).folder)))


if __name__ == "__main__":
    main()
