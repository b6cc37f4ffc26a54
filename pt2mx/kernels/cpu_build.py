"""Building and loading the C++ kernels of the CPU: the sources of this folder, in one library.

It is built at first use with the C++ compiler that Inductor would use, in seconds, and kept in the folder of torch's
extensions (`TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`). It needs no torch headers: tensors go in
as pointers, and torch's threads come in as the function `torch_parallel_for` of torch's stable C interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from torch._inductor import cpp_builder

__all__ = ["DTYPES", "is_available", "load"]

#: tensors' dtypes, in the order of cpp's enumeration
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(str(path) for path in sorted(_FOLDER.glob("*.cpp")))
_HEADERS = tuple(str(path) for path in sorted(_FOLDER.glob("*.h")))
#: what the library offers, and its arguments
_FUNCTIONS = {
    "pt2mx_run": (ctypes.c_void_p, ctypes.c_void_p),
    "pt2mx_random_bits": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    "pt2mx_linear": (ctypes.c_void_p, ctypes.c_void_p),
    "pt2mx_has_tiles": (),
}
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
_loaded: list[tuple[ctypes.CDLL, ctypes.c_void_p] | None] = []  # what the one attempt of this process gave


def is_available() -> bool:
    """Whether the kernels serve; the first call loads or builds them, and warns where that fails."""
    return load() is not None


def load() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The library and torch's `torch_parallel_for`, or None."""
    if not _loaded:
        with _lock:
            if not _loaded:
                _attempt()
    return _loaded[0]


def _attempt() -> None:
    try:
        # a handle finds the names of what it depends on: libtorch_cpu on every platform
        parallel_for = ctypes.cast(ctypes.CDLL(torch._C.__file__).torch_parallel_for, ctypes.c_void_p)
        library = _library()
        for name, arguments in _FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, RuntimeError, AttributeError) as error:
        _loaded.append(None)  # first: a warning may be raised
        warnings.warn(
            "the C++ kernels of pt2mx could not be built, and plain torch operations serve in their place: the same "
            f"numbers, many times slower. Install a C++ compiler (g++ or clang++) or name one in CXX. {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        _loaded.append((library, parallel_for))


def _library() -> ctypes.CDLL:
    """The shared library, from the cache or built now."""
    compiler = cpp_builder.get_cpp_compiler()
    capability = torch.backends.cpu.get_cpu_capability()
    flags = _FLAGS + _VECTOR_FLAGS.get(capability, ())
    source = [Path(path).read_bytes() for path in _HEADERS + _SOURCES]
    version = cpp_builder.get_compiler_version_info(compiler)
    key = hashlib.sha256(repr((source, flags, compiler, version, platform.machine())).encode()).hexdigest()[:20]
    path = _cache_folder() / f"cpu-{key}.so"
    with contextlib.suppress(OSError):  # none there yet, or a damaged one
        return ctypes.CDLL(str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(compiler, flags, path)
        return ctypes.CDLL(str(path))
    except OSError:  # a folder that cannot be written, or not be executed from
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            _build(compiler, flags, Path(folder) / path.name)
            return ctypes.CDLL(str(Path(folder) / path.name))


def _cache_folder() -> Path:
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root) / "pt2mx"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "torch_extensions" / "pt2mx"


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile to `path`. Other processes may do the same now: each writes a file of its own, and moves it there."""
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *flags, *_SOURCES, "-o", unfinished]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
