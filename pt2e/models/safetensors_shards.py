"""Read and write safetensors files some rows at a time, so that tensors need not fit into memory.

The package safetensors reads and checks headers. It maps the file into memory to read tensors: a pass over 537 MB takes
533 MB and .52 s; reading rows takes 50 MB and .12 s. It writes no rows. A file consists of the length of its header
(8 bytes, little-endian), the header (JSON: name -> dtype, shape, offsets) and the bytes of the tensors, one after the
other. Shapes are known in advance, so the header is written first.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import one_line

if TYPE_CHECKING:
    from typing_extensions import Self

#: name in the file format -> dtype
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: bytes to read at a time; longer rows are read whole
SLICE = 1 << 24
_METADATA = "__metadata__"
_LENGTH = 8
#: values that torch can count; safetensors takes empty tensors of larger sizes
_MOST_VALUES = (1 << 63) - 1


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype, its shape and the position of its bytes. A scalar has one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.values * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows if self.rows else 0


class Header(NamedTuple):
    """The header of a shard: its tensors by name, and the strings of its metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


class ShardReader:
    """Reads the tensors of a file, whose header may have been read before."""

    def __init__(self, path: Path, header: Header | None = None) -> None:
        self.path = path
        self.entries, self.metadata = header or read_header(path)
        self._file = open(path, "rb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def slices(self, name: str, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield slices of a tensor along its rows, each with the index of its first row, which is a multiple of
        `multiple`; a scalar is one slice."""
        entry = self.entries[name]
        step = max(1, SLICE // max(1, entry.row_bytes) // multiple) * multiple
        for first in range(0, entry.rows, step):
            yield first, self.rows(name, first, min(step, entry.rows - first))

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor."""
        return self.rows(name, 0, self.entries[name].rows)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return `count` rows of a tensor, from row `first` on."""
        entry = self.entries[name]
        buffer = torch.empty(count * entry.row_bytes, dtype=torch.uint8)
        view, position, read = buffer.numpy().data, entry.begin + first * entry.row_bytes, 0
        while read < len(view):
            length = os.preadv(self._file.fileno(), [view[read:]], position + read)
            if not length:
                raise MXError(f"{str(self.path)!r} ends too early: it changed while it was read")
            read += length
        return buffer.view(entry.dtype).view((count, *entry.shape[1:]) if entry.shape else ())


class ShardWriter:
    """Writes a file of tensors, by their names, dtypes and shapes. Their rows may come in any order."""

    def __init__(self, file: io.FileIO, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        # the largest dtypes first, so that each tensor is aligned to its dtype
        ordered = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
        header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
        self._file, self._entries, end = file, {}, 0
        for name in ordered:
            entry = entries[name]
            header[name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.nbytes],
            }
            self._entries[name] = Entry(entry.dtype, entry.shape, end)
            end += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH)
        self._begin = _LENGTH + len(text)
        file.write(len(text).to_bytes(_LENGTH, "little") + text)

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Write rows of a tensor, the first of them at index `first`."""
        entry = self._entries[name]
        if rows.dtype != entry.dtype or tuple(rows.shape[1:]) != entry.shape[1:]:
            raise MXError(
                f"rows of {name} are {rows.dtype} of shape {tuple(rows.shape)}, but its header says {entry.dtype} of "
                f"shape {entry.shape}"
            )
        self._file.seek(self._begin + entry.begin + first * entry.row_bytes)
        self._file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_header(path: Path) -> Header:
    """Read the header of a file."""
    try:
        with import_extra("safetensors", "hf").safe_open(path, "np") as file:
            stated = {}
            for name in file.offset_keys():
                stored = file.get_slice(name)
                stated[name] = stored.get_dtype(), tuple(stored.get_shape())
            metadata = file.metadata() or {}
        with open(path, "rb") as opened:
            begin = _LENGTH + int.from_bytes(opened.read(_LENGTH), "little")
    except OSError as error:
        reason = error.strerror or str(error).partition(":")[0]
        raise MXError(f"cannot read {str(path)!r}: {reason}") from None
    except Exception as error:
        raise MXError(f"{str(path)!r} is no whole file of safetensors: {one_line(error)}; fetch it again") from None
    entries = {}
    for name, (dtype, shape) in stated.items():
        if dtype not in DTYPES:
            raise MXError(f"{str(path)!r} has {name} in a dtype that is not known: {dtype}")
        if math.prod(filter(None, shape)) > _MOST_VALUES:
            raise MXError(f"{str(path)!r} has {name} of shape {shape}, which is too large: fetch it again")
        # safetensors refuses files in which tensors do not follow each other
        entries[name] = Entry(DTYPES[dtype], shape, begin)
        begin += entries[name].nbytes
    return Header(entries, metadata)
