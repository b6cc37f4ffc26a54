"""Build the shared library of the operators: the CPU kernels, registered by torch's stable C++ interface.

It is built on the user's machine from sources in the wheel, as the kernels are (`pt2mx.kernels.cpu.build`): with the
compiler that Inductor uses, in seconds, once for a version of torch and a processor.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from pt2mx.errors import MXError, nearest
from pt2mx.kernels.cpu.build import HEADERS as KERNEL_HEADERS
from pt2mx.kernels.cpu.build import SOURCES as KERNEL_SOURCES
from pt2mx.kernels.cpu.build import cache_folder, use_built, write_library

#: the name of the file: a linked program looks for it
NAME = "libpt2mx_ops.so"

_FOLDER = Path(__file__).parent / "src"
_SOURCES = (*KERNEL_SOURCES, *(str(path) for path in sorted(_FOLDER.glob("*.cpp"))))
HEADERS = (*KERNEL_HEADERS, *(str(path) for path in sorted([*_FOLDER.glob("*.h"), *_FOLDER.glob("*.inc")])))
#: the first torch whose stable interface is used
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")


def library_path() -> Path:
    """Return the path of the library, built at the first call and kept in the cache of torch's extensions.

    Returns:
        The path of `libpt2mx_ops.so`, for this processor.

    Raises:
        MXError: where it cannot be built, or the cache cannot be written.

    Example:
        >>> import pt2mx
        >>> pt2mx.cpp.library_path().name
        'libpt2mx_ops.so'
    """
    content = _content()
    path = cache_folder() / f"ops-{hashlib.sha256(content).hexdigest()[:20]}" / NAME
    try:
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_library(content, path)
    except OSError as error:
        raise MXError(
            f"cannot keep {str(path)!r} ({error.strerror}): pt2mx.cpp.build writes to another folder"
        ) from None
    return path


def build(folder: str | os.PathLike[str], capability: str | None = None) -> Path:
    """Write the library to a folder, for a host program that is shipped with it.

    Args:
        folder: an existing folder; the file is called `libpt2mx_ops.so`.
        capability: of the processors that will run it: "DEFAULT", "AVX2" or "AVX512"; None for this processor's.

    Returns:
        The path of the library.

    Raises:
        MXError: for another capability, where the library cannot be built, and where it cannot be written.

    Example:
        >>> import tempfile, pt2mx
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pt2mx.cpp.build(folder).name
        'libpt2mx_ops.so'
    """
    if capability not in (None, *_CAPABILITIES):
        raise MXError(f"unknown capability {capability!r}: {nearest(capability, _CAPABILITIES)}")
    path = Path(folder) / NAME
    if not path.parent.is_dir() or path.is_dir():
        raise MXError(f"cannot write {str(path)!r}: it must be a file in a folder that exists")
    try:
        write_library(_content(capability), path)
    except OSError as error:
        raise MXError(f"cannot write {str(path)!r}: {error.strerror}") from None
    return path


def cmake_lines(target: str = "host") -> str:
    """Return what a CMakeLists.txt needs for a program that runs packages.

    Args:
        target: the executable, added by `add_executable`.

    Returns:
        The lines, with the path of `library_path`.

    Raises:
        MXError: as `library_path`.

    Example:
        >>> import pt2mx
        >>> "libpt2mx_ops.so" in pt2mx.cpp.cmake_lines("server")
        True
    """
    lines = (
        f'list(APPEND CMAKE_PREFIX_PATH "{torch.utils.cmake_prefix_path}")',
        "find_package(Torch REQUIRED)",
        # the program uses no symbol of the library, which registers operators when it is loaded
        f'target_link_libraries({target} PRIVATE ${{TORCH_LIBRARIES}} -Wl,--no-as-needed "{library_path()}")',
    )
    return "\n".join(lines) + "\n"


def _content(capability: str | None = None) -> bytes:
    """Return the bytes of the library, from the cache or built now."""
    more = (
        *("-fvisibility=hidden", f"-Wl,-soname,{NAME}", TARGET, f"-I{Path(KERNEL_SOURCES[0]).parent}"),
        *(f"-I{path}" for path in include_paths()),
        *(f"-L{path}" for path in library_paths()),
        "-ltorch_cpu",
    )
    try:
        return use_built("ops", _SOURCES, HEADERS, Path.read_bytes, more, capability)
    except (OSError, RuntimeError) as error:
        raise MXError(
            f"cannot build {NAME}: install a C++ compiler (g++ or clang++) or name one in CXX. {error}"
        ) from None
