"""The library that programs of Quark register with onnxruntime before they load a quantized file."""

from __future__ import annotations

from pathlib import Path

from pt2mx.errors import MXError, nearest
from pt2mx.kernels.cpu.build import cache_folder, use_built

_SOURCE = Path(__file__).parent / "src" / "register.cpp"
_DEVICES = ("CPU", "CUDA", "ROCM")


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """Return the path that `SessionOptions.register_custom_ops_library` takes, as Quark's function of this name does.

    The library registers no operator: the files that pt2mx writes hold bodies of standard operators, and stock
    onnxruntime runs them with or without it. The first call builds it, in the cache of torch's extensions.

    Args:
        device: "CPU", "CUDA" or "ROCM".
        lib: "custom_ops".

    Returns:
        The path of the library.

    Raises:
        MXError: for another device or library, where it cannot be built, or the cache cannot be written.

    Example:
        >>> import onnxruntime
        >>> from pt2mx import quark
        >>> onnxruntime.SessionOptions().register_custom_ops_library(quark.get_library_path("CPU"))
    """
    for name, value, allowed in (("device", device, _DEVICES), ("lib", lib, ("custom_ops",))):
        if not isinstance(value, str) or value.upper() not in map(str.upper, allowed):
            raise MXError(f"unknown {name} {value!r}: {nearest(value, allowed)}")
    try:
        path = use_built("quark", (str(_SOURCE),), (), lambda path: path)
    except (OSError, RuntimeError) as error:
        raise MXError(f"cannot build {_SOURCE.name}: install a C++ compiler, or name one in CXX ({error})") from None
    if not path.is_file():
        raise MXError(f"cannot keep the library in {str(cache_folder())!r}: name a folder in TORCH_EXTENSIONS_DIR")
    return str(path)
