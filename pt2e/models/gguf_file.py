"""Read a GGUF file of llama.cpp: its metadata, and the bytes of its tensors, which stay on disk until they are read.

A file consists of a header (magic, version, two counts), the metadata (key, type, value), the table of tensors (name,
dimensions, type, offset) and the bytes of the tensors. Integers are little-endian. Dimensions are in the reverse order
of torch.

`gguf.GGUFReader` makes an array of each token: for 49,000 of them it takes 2.1 s and 165 MB, against .08 s and 16 MB
here, and a damaged count keeps it busy for more than 20 s.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
#: longest table of dimensions
_DIMENSIONS = 4
#: letters of a damaged name to show
_NAMED = 64
#: type of a metadata value -> its format in `struct`
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: types whose values are floats of torch
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class Entry(NamedTuple):
    """A tensor of the file: the name of its type, its shape in torch's order, and its bytes."""

    type: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class GGUFFile:
    """The metadata and the tensors of a GGUF file.

    Args:
        path: the file.
        length: the bytes that the file will have, where only its first tensors are written; None: its own.

    Attributes:
        metadata: key -> value: a number, a bool, a str, or a list of these.
        entries: name -> the tensor's type, shape and bytes.

    Raises:
        MXError: where the file cannot be read, is no GGUF file of version 2 or 3, is truncated, or holds a tensor of a
            type that the package `gguf` does not know.
    """

    def __init__(self, path: str | os.PathLike[str], length: int | None = None) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise MXError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._length = len(self._bytes) if length is None else length
        cursor = _Cursor(self.path, self._bytes)
        tensors, values = cursor.header()
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = cursor.name()
            (kind,) = cursor.scalars("I")
            self.metadata[key] = cursor.value(kind, key)
        self.entries = self._entries([cursor.tensor() for _ in range(tensors)], cursor.position)
        files = self.metadata.get("split.count", 1)
        if files not in (0, 1):
            raise MXError(
                f"{str(path)!r} is one of {files} files of a model: merge them with `llama-gguf-split --merge`"
            )

    def text(self, key: str) -> str:
        """Return a string of the metadata."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise MXError(f"{str(self.path)!r} has no string {key} in its metadata: convert the model to GGUF again")
        return value

    def blocks(self, name: str) -> Tensor:
        """Return the bytes of a tensor as (..., bytes of a row) uint8, a view of the file; of a float type its values.

        Writing to the result does not change the file.
        """
        entry = self.entries[name]
        stored = self._bytes[entry.begin : entry.begin + entry.nbytes]
        if entry.type in DTYPES:
            return stored.view(DTYPES[entry.type]).view(entry.shape)
        return stored.view(*entry.shape[:-1], -1)

    def release(self) -> None:
        """Free the memory of what was read; it is read from the file again where it is needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def values(self, name: str, blocks: Tensor | None = None) -> Tensor:
        """Return the values of a tensor, or of some of the rows that `blocks` returns, in float32 for a type of blocks,
        with the bits of gguf's `dequantize`."""
        entry, gguf = self.entries[name], import_extra("gguf", "gguf")
        if blocks is None:
            blocks = self.blocks(name)
        if entry.type in DTYPES:
            return blocks
        try:
            values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[entry.type])
        except NotImplementedError:
            raise MXError(
                f"{name} is {entry.type}, which gguf cannot dequantize: convert the file with `llama-quantize "
                "--allow-requantize FILE.gguf OUT.gguf F16`"
            ) from None
        return torch.from_numpy(values)

    def _entries(self, table: list[tuple[str, tuple[int, ...], int, int]], end: int) -> dict[str, Entry]:
        gguf, entries = import_extra("gguf", "gguf"), {}
        alignment = self.metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment.bit_count() > 1:
            raise MXError(f"{str(self.path)!r} has {_ALIGNMENT} {alignment!r}: it must be a power of two, at least 8")
        start = expected = _padded(end, alignment)
        for name, shape, number, offset in table:
            if number not in gguf.GGMLQuantizationType._value2member_map_:
                raise MXError(
                    f"{name} in {str(self.path)!r} has the unknown type {number}: install a newer gguf, or convert the "
                    "file with `llama-quantize --allow-requantize FILE.gguf OUT.gguf F16`"
                )
            kind = gguf.GGMLQuantizationType(number)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                raise MXError(
                    f"{name} in {str(self.path)!r} is {shape}: its rows must be whole blocks of {kind.name}, of "
                    f"{block} values; convert the model to GGUF again"
                )
            if name in entries:
                raise MXError(f"{str(self.path)!r} holds {name} twice: convert the model to GGUF again")
            nbytes, begin = math.prod(shape) // block * block_bytes, start + offset
            # tensors follow each other in the order of the table, as every writer writes them
            if begin != expected or begin + nbytes > self._length:
                raise MXError(
                    f"{name} in {str(self.path)!r} has its bytes at {begin} to {begin + nbytes}, the tensor before it "
                    f"ends at {expected}, the file at {self._length}: it is truncated or damaged, fetch it again"
                )
            expected = begin + _padded(nbytes, alignment)
            entries[name] = Entry(kind.name, shape, begin, nbytes)
        # otherwise the table is not whole, and its end not where the first tensor begins
        if self._length > expected:
            raise MXError(
                f"{str(self.path)!r} has its last tensor end at {expected}, and ends at {self._length}: it is "
                "damaged, fetch it again"
            )
        return entries


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class _Cursor:
    """Reads the values of the header one after the other."""

    def __init__(self, path: Path, stored: Tensor) -> None:
        self._path, self._view, self.position = path, memoryview(stored.numpy().data), 0

    def header(self) -> tuple[int, int]:
        """Return the number of tensors and the number of metadata values."""
        magic = bytes(self._view[: len(_MAGIC)])
        if magic != _MAGIC:
            raise MXError(f"{str(self._path)!r} begins with {magic!r}, not with {_MAGIC!r}: it is no GGUF file")
        self.position = len(_MAGIC)
        (version,) = self.scalars("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            order = f"big-endian, version {swapped}" if swapped in _VERSIONS else f"of version {version}"
            raise MXError(
                f"{str(self._path)!r} is {order}: give a little-endian file of version 2 or 3 (convert the model again)"
            )
        tensors, values = self.scalars("QQ")
        return tensors, values

    def scalars(self, kinds: str) -> tuple[Any, ...]:
        """Return numbers in formats of `struct`."""
        return struct.unpack("<" + kinds, self._take(struct.calcsize("<" + kinds)))

    def string(self) -> str:
        (length,) = self.scalars("Q")
        # some tokens are no complete UTF-8
        return bytes(self._take(length)).decode("utf-8", errors="surrogateescape")

    def name(self) -> str:
        """Return the name of a value or of a tensor."""
        name = self.string()
        if not name.isprintable():
            raise MXError(f"{str(self._path)!r} holds the name {name[:_NAMED]!r}: it is damaged, fetch it again")
        return name

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:  # of numbers or strings, never of arrays
            kind, count = self.scalars("IQ")
            if kind in _SCALARS:
                width = struct.calcsize("<" + _SCALARS[kind])
                return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * width)))
            if kind == _STRING:
                if self.position + count > len(self._view):  # a damaged count would keep the loop busy
                    self._truncated()
                return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise MXError(f"{key} in {str(self._path)!r} has a value of the unknown type {kind}: fetch the file again")
        return self.scalars(_SCALARS[kind])[0]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name of a tensor, its shape in torch's order, the number of its type, and its offset."""
        name = self.name()
        (dimensions,) = self.scalars("I")
        if not 0 < dimensions <= _DIMENSIONS:
            raise MXError(f"{name} in {str(self._path)!r} has {dimensions} dimensions: fetch the file again")
        shape = self.scalars(f"{dimensions}Q")[::-1]
        number, offset = self.scalars("IQ")
        return name, shape, number, offset

    def _take(self, length: int) -> memoryview:
        begin, self.position = self.position, self.position + length
        if self.position > len(self._view):
            self._truncated()
        return self._view[begin : self.position]

    def _truncated(self) -> NoReturn:
        raise MXError(f"{str(self._path)!r} ends within its header, at {len(self._view)} bytes: fetch it again")
