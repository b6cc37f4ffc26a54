"""Build and load the C++ kernels of the CPU: the sources in `src/`, as one library.

A wheel brings the library, built for each instruction set (`prebuilt`). Otherwise it is built at first use, in seconds,
with the C++ compiler that Inductor uses, and kept in the folder of torch's extensions (`TORCH_EXTENSIONS_DIR`, by
default `~/.cache/torch_extensions`) under a name that contains the digest of its bytes: another process loads it if it
is complete, and builds it again otherwise. A process without a compiler loads what any compiler has built. The library
needs no torch headers: tensors are passed as pointers, and torch's threads as `torch_parallel_for` of torch's stable C
interface. So one library serves all versions of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import secrets
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from pt2mx.kernels.cpu.calls import FUNCTIONS

_T = TypeVar("_T")

#: dtypes of tensors, in the order of the enumeration in calls.h
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_FOLDER = Path(__file__).parent / "src"
#: the folder with a wheel's libraries; a checkout has none
LIBRARIES = Path(__file__).parent / "libraries"
SOURCES = tuple(str(path) for path in sorted(_FOLDER.glob("*.cpp")))
HEADERS = tuple(str(path) for path in sorted(_FOLDER.glob("*.h")))
#: what a function returns if it does not support a call
_UNSUPPORTED = -1
# no contraction to fused multiply-adds, no -ffast-math: both change bits
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp-simd"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)
_VECTOR_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ),
}
_lock = threading.Lock()
#: the result of this process's only attempt to load; empty before it
_loaded: list[tuple[ctypes.CDLL, ctypes.c_void_p] | None] = []


def is_available() -> bool:
    """Return True if the kernels can be used. The first call loads or builds them, and warns if that fails."""
    if not _loaded:
        with _lock:
            if not _loaded:
                _attempt()
    return _loaded[0] is not None


def load() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Return the library and torch's `torch_parallel_for`; raise RuntimeError if they are not available."""
    if not is_available() or _loaded[0] is None:
        raise RuntimeError("the C++ kernels of pt2mx are not available on this machine")
    return _loaded[0]


def run(function: str, structure: ctypes.Structure, *numbers: int | None) -> bool:
    """Run a function of the library on torch's threads. Return False if it does not support the call, and computed
    nothing."""
    library, parallel_for = load()
    error = getattr(library, function)(ctypes.addressof(structure), *numbers, parallel_for)
    if error not in (0, _UNSUPPORTED):
        raise RuntimeError("torch_parallel_for failed")
    return error == 0


def _attempt() -> None:
    try:
        # a handle also finds the symbols of its dependencies: libtorch_cpu on every platform
        parallel_for = ctypes.cast(ctypes.CDLL(torch._C.__file__).torch_parallel_for, ctypes.c_void_p)
        library = _library()
        for name, (result, arguments) in FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
            getattr(library, name).restype = result
    except (OSError, RuntimeError, AttributeError) as error:
        _loaded.append(None)  # before the warning, which filters may turn into an error
        warnings.warn(
            "the C++ kernels of pt2mx could not be built, and plain torch operations are used instead: the same "
            "numbers, many times slower. Install a wheel that brings them, or a C++ compiler (g++ or clang++), or name "
            f"one in CXX. {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        _loaded.append((library, parallel_for))


def _library() -> ctypes.CDLL:
    """Return the shared library, from the wheel, from the cache or built now."""
    path = LIBRARIES / library_name(torch.backends.cpu.get_cpu_capability())
    if path.is_file():
        with contextlib.suppress(OSError):  # another machine's wheel, unpacked here
            return ctypes.CDLL(str(path))
    return use_built("cpu", SOURCES, HEADERS, lambda path: ctypes.CDLL(str(path)))


def library_name(capability: str) -> str:
    """Return the file name of a wheel's library for processors of a capability. The name contains the digest of the
    sources, so that edited sources are built."""
    content = repr((_contents(HEADERS, SOURCES), flags_of(capability))).encode()
    return f"{capability.lower()}-{_digest(content)}.so"


def flags_of(capability: str) -> tuple[str, ...]:
    """Return the compiler's flags for processors of a capability, as `torch.backends.cpu` names it."""
    return _FLAGS + _VECTOR_FLAGS.get(capability, ())


def use_built(
    name: str,
    sources: Sequence[str],
    headers: Sequence[str],
    use: Callable[[Path], _T],
    more: tuple[str, ...] = (),
    capability: str | None = None,
) -> _T:
    """Call `use` with the path of a shared library, from the cache or built now, and return the result.

    If the cache cannot be written, the library is deleted after the call. `use` raises OSError for a library that it
    cannot load, which is then built again.

    Args:
        name: the prefix of its files in the cache.
        sources, headers: the files that it is built from.
        use: is called with the path of the library.
        more: arguments of the compiler after the sources.
        capability: of the processor, as `torch.backends.cpu.get_cpu_capability` names it; None for this processor's.

    Raises:
        RuntimeError: if it cannot be compiled, or there is no compiler.
        OSError: if `use` cannot load the library built now either.
    """
    from torch._inductor import cpp_builder  # a slow import that `import pt2mx` does not need

    flags = flags_of(capability or torch.backends.cpu.get_cpu_capability())
    content = _contents(headers, sources)
    stem = f"{name}-{_digest(repr((content, flags, more, platform.machine())).encode())}"
    missing, by = None, "*"
    try:
        compiler = cpp_builder.get_cpp_compiler()
        by = _digest(repr((compiler, cpp_builder.get_compiler_version_info(compiler))).encode())
    except Exception as error:  # torch's own class: what any compiler has built will do
        missing = error
    cache = cache_folder()
    for path in cache.glob(f"{stem}-{by}-*.so"):
        if _is_sound(path):
            with contextlib.suppress(OSError):  # the folder may not allow execution
                return use(path)
    if missing is not None:
        raise RuntimeError(f"there is no compiler: {missing}") from missing
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"{name}.so"
        compile_library(compiler, (*flags, *sources, *more), path)
        if _contents(headers, sources) != content:  # installed anew meanwhile: build these files, under their own key
            return use_built(name, sources, headers, use, more, capability)
        with contextlib.suppress(OSError):  # the folder may not be writable
            return use(_keep(path, cache, f"{stem}-{by}"))
        return use(path)


def _contents(headers: Sequence[str], sources: Sequence[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in (*headers, *sources)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _is_sound(path: Path) -> bool:
    """Return True if a file of the cache is complete: loading a truncated library crashes the process. Remove a damaged
    one if possible."""
    with contextlib.suppress(OSError):
        if path.is_file() and _digest(path.read_bytes()) == path.stem.rpartition("-")[2]:
            return True
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()
    return False


def _keep(built: Path, cache: Path, name: str) -> Path:
    """Copy a library to the cache, under a name that contains its digest."""
    content = built.read_bytes()
    path = cache / f"{name}-{_digest(content)}.so"
    cache.mkdir(parents=True, exist_ok=True)
    write_library(content, path)
    return path


def write_library(content: bytes, path: Path) -> None:
    """Write a library under a temporary name and rename it: other processes may write or load it at the same time."""
    unfinished = path.with_name(f".{secrets.token_hex(8)}")
    try:
        unfinished.write_bytes(content)
        unfinished.chmod(0o755)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def cache_folder() -> Path:
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root) / "pt2mx"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "torch_extensions" / "pt2mx"


def compile_library(compiler: str, arguments: Sequence[str], path: Path) -> None:
    """Compile a shared library, its sources at the same time.

    Args:
        compiler: the command of a C++ compiler.
        arguments: its flags, and the paths of the sources.
        path: the library.

    Raises:
        RuntimeError: with the compiler's message.
    """
    sources = [one for one in arguments if not one.startswith("-")]
    flags = [one for one in arguments if one.startswith("-")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder) / f"{number}.o") for number in range(len(sources))]
        commands = [[compiler, *flags, "-c", source, "-o", name] for source, name in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        _run([compiler, *objects, *flags, "-o", str(path)])


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
