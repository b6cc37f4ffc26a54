"""Make the tensors of a GGUF file of the tensors of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.gguf_metadata import architecture_named, rope_tensors
from pt2mx.pt2e.checkpoints.gguf_write import FileTensor
from pt2mx.pt2e.models.gguf_blocks import BLOCK_TYPES, NVFP4_TYPE
from pt2mx.pt2e.models.gguf_file import DTYPES
from pt2mx.pt2e.models.gguf_names import Source, sources_of
from pt2mx.pt2e.models.gguf_tensors import GGUF
from pt2mx.pt2e.models.safetensors_shards import Entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TYPES = {dtype: name for name, dtype in DTYPES.items()}
#: matrices that llama.cpp reads in float32 only
_FLOAT32 = ("ffn_gate_inp.weight",)
_EMBEDDING = "token_embd.weight"
#: a part of a checkpoint, and where the file holds it
Piece = tuple[str, Source]


class Contents(Protocol):
    """The tensors of a checkpoint in the layout `GGUF`, by name."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Their dtypes and shapes."""

    def slices(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a tensor in order."""

    def codes(self, names: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the codes and scales of a weight, some rows at a time, from the names of its tensors."""

    def tensor_scale(self, names: tuple[str, ...]) -> Tensor:
        """Return the tensor scale of a weight, () float32."""


class TensorsInMemory:
    """The `Contents` of a dictionary."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def slices(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name].detach()

    def codes(self, names: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._tensors[names[0]], self._tensors[names[1]]

    def tensor_scale(self, names: tuple[str, ...]) -> Tensor:
        return self._tensors[names[2]].view(())


def file_tensors(model: PreTrainedModel, contents: Contents) -> dict[str, FileTensor]:
    """Return the tensors of the file by name, in order.

    Args:
        model: the model, on any device, also meta.
        contents: its tensors.

    Raises:
        MXError: for experts of several types, and for a scaling of RoPE that GGUF has not.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    kinds: dict[str, set[str]] = defaultdict(set)
    tied = model.all_tied_weights_keys or {}
    for part, source in sources_of(model, architecture_named(model.config), untied=True).items():
        kind = _type_of(part, source, contents)
        if kind is not None:
            pieces[source.name].append((part, source))
            kinds[source.name].add(kind)
        elif source.parameter not in {*tied, *tied.values()}:
            raise MXError(f"a GGUF file holds {part} by itself, which the checkpoint holds with others: quantize it")
    tensors = {
        name: FileTensor("F32", tuple(values.shape), partial(_once, values))
        for name, values in rope_tensors(model.config).items()
    }
    for name, parts in pieces.items():
        if len(kinds[name]) > 1:
            types = " and ".join(sorted(kinds[name]))
            raise MXError(f"GGUF holds the experts {name} in one type: they are in {types}")
        kind, source = kinds[name].pop(), parts[0][1]
        parts.sort(key=lambda piece: piece[1].expert or 0)
        experts = () if source.expert is None else (len(parts),)
        shape = (*experts, *_shape_of(parts[0][0], kind, contents))
        tensors[name] = FileTensor(kind, shape, partial(_chunks, contents, kind, parts))
        if kind == NVFP4_TYPE and (scales := _tensor_scales(contents, parts)).ne(1).any():
            if name == _EMBEDDING:
                raise MXError(f"llama.cpp has no tensor scale of {parts[0][0]}: leave it in high precision")
            tensors[source.scales[0]] = FileTensor("F32", tuple(scales.shape), partial(_once, scales))
    return tensors


def _type_of(part: str, source: Source, contents: Contents) -> str | None:
    """Return the type of a part in the file; None where the contents lack it."""
    for row in BLOCK_TYPES.values():
        if GGUF.names(part, row.form)[0] in contents.entries:
            return row.name
    if part not in contents.entries:
        return None
    entry = contents.entries[part]
    return "F32" if len(entry.shape) == 1 or source.name.endswith(_FLOAT32) else _TYPES[entry.dtype]


def _shape_of(part: str, kind: str, contents: Contents) -> tuple[int, ...]:
    if kind not in BLOCK_TYPES:
        return contents.entries[part].shape
    row = BLOCK_TYPES[kind]
    *rows, width = contents.entries[GGUF.names(part, row.form)[0]].shape
    columns = width * 8 // row.spec.element.bits
    row.check_columns(part, columns)
    return (*rows, columns)


def _chunks(contents: Contents, kind: str, parts: list[Piece]) -> Iterator[Tensor]:
    """Yield the blocks or the values of a tensor, whose rows have the file's order."""
    for part, source in parts:
        if kind in BLOCK_TYPES:
            row = BLOCK_TYPES[kind]
            slices = (row.to_blocks(part, *pair) for pair in contents.codes(GGUF.names(part, row.form)))
        else:
            slices = (values.to(DTYPES[kind]) for values in contents.slices(part))
        for rows in slices if source.rows is None else (torch.cat(list(slices)),):
            rows = source.order(rows)
            yield rows + source.offset if source.offset else rows


def _tensor_scales(contents: Contents, parts: list[Piece]) -> Tensor:
    form = BLOCK_TYPES[NVFP4_TYPE].form
    return torch.stack([contents.tensor_scale(GGUF.names(part, form)) for part, _ in parts])


def _once(values: Tensor) -> Iterator[Tensor]:
    yield values
