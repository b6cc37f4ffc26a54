"""Load a GGUF file as a model of transformers: weights in `BLOCK_TYPES` as codes, or all weights as values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.functional import dequantize_mx
from pt2mx.pt2e.models.build_model import skeleton_of, with_tensors
from pt2mx.pt2e.models.checkpoint_files import StoredTensors
from pt2mx.pt2e.models.checkpoint_names import Parts, linear_parts
from pt2mx.pt2e.models.gguf_blocks import BLOCK_TYPES, NVFP4_TYPE, BlockType
from pt2mx.pt2e.models.gguf_file import DTYPES, GGUFFile
from pt2mx.pt2e.models.gguf_model import ARCHITECTURE, ROPE_TENSORS, architecture_of, config_of
from pt2mx.pt2e.models.gguf_names import Source, sources_of
from pt2mx.pt2e.models.layouts import Layout, Stored
from pt2mx.pt2e.models.module_schemes import Rules, Scheme, Schemes, is_transposed
from pt2mx.pt2e.models.safetensors_shards import SLICE, Entry
from pt2mx.pt2e.models.weight_formats import read_tensor_scale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the layout of a GGUF file, whose tensors have names of transformers
GGUF = Layout(
    "gguf",
    {
        row.form: Stored(
            f"_{row.name.lower()}",
            "_scale",
            scale_dtype=row.spec.scale_dtype,
            tensor_scale="_tensor_scale" if row.spec.has_tensor_scale else "",
        )
        for row in BLOCK_TYPES.values()
    },
    dtypes=tuple(DTYPES.values()),
    embeddings=tuple(row.form for row in BLOCK_TYPES.values()),
    linear_experts=True,
)


class GGUFTensors(StoredTensors):
    """The tensors of a GGUF file by their names in a checkpoint of transformers.

    A weight whose codes are kept is there as `<name>_mxfp4` (or the name of another type) and `<name>_scale`, in NVFP4
    also as `<name>_tensor_scale`. A weight of the model that is made of tensors of several types becomes values.

    Args:
        file: the file.
        model: the model that it holds, on any device, also meta.
        keeps: a predicate of parameters and formats of `BLOCK_TYPES`: True for weights whose codes are kept.

    Raises:
        MXError: where the file lacks a tensor of the model, or holds one that the model has not.
    """

    def __init__(self, file: GGUFFile, model: PreTrainedModel, keeps: Callable[[str, str], bool]) -> None:
        self._file, self._sources = file, sources_of(model, file.text(ARCHITECTURE))
        self._check(type(model).__name__)
        parts, types = defaultdict(list), defaultdict(set)
        for part, source in self._sources.items():
            entry = file.entries[source.name]
            parts[source.parameter].append(part)
            types[source.parameter].add(entry.type if len(entry.shape) > 1 else "values")
        kept = {
            parameter
            for parameter, (kind, *others) in types.items()
            if not others and kind in BLOCK_TYPES and keeps(parameter, BLOCK_TYPES[kind].form)
        }
        #: tensor of the checkpoint -> the type of its codes
        self.packed: dict[str, BlockType] = {}
        #: the dtypes and shapes of all tensors by name
        self.entries: dict[str, Entry] = {}
        # name -> the part of a parameter, or the rows of each part
        self._names: dict[str, str | Parts] = {}
        for parameter, names in parts.items():
            if parameter in kept:
                for part in names:
                    self._pack(part)
            elif is_transposed(model, parameter) and parameter.removesuffix("_bias") not in kept:
                self._names[parameter] = linear_parts(model, parameter)
                dtype = self._entry(names[0]).dtype
                self.entries[parameter] = Entry(dtype, tuple(model.get_parameter(parameter).shape))
            else:
                self._names |= {part: part for part in names}
                self.entries |= {part: self._entry(part) for part in names}
        self.dtypes = {name: entry.dtype for name, entry in self.entries.items()}

    def _check(self, model: str) -> None:
        entries, path = self._file.entries, str(self._file.path)
        read = {name for source in self._sources.values() for name in (source.name, *source.scales)}
        pieces = Counter(source.name for source in self._sources.values())
        for part, source in self._sources.items():
            if source.name not in entries:
                raise MXError(f"{path!r} lacks {source.name}, which the model has as {part}: convert it again")
            experts = () if source.expert is None else (pieces[source.name],)
            expected = {source.name: (*experts, *source.shape), **dict.fromkeys(source.scales, experts or (1,))}
            for name in expected.keys() & entries.keys():
                if entries[name].shape != expected[name]:
                    raise MXError(
                        f"{path!r} has {name} of shape {entries[name].shape}, its metadata of {expected[name]}: fetch "
                        "it again"
                    )
        if unknown := sorted(entries.keys() - read - {*ROPE_TENSORS}):
            raise MXError(f"{path!r} holds {unknown[0]}, which {model} has not: give the checkpoint of Hugging Face")

    def _pack(self, part: str) -> None:
        row = self.packed[part] = BLOCK_TYPES[self._file.entries[self._sources[part].name].type]
        names, stored, spec = GGUF.names(part, row.form), GGUF.stored[row.form], row.spec
        *rows, columns = self._entry(part).shape
        entries = (
            Entry(stored.dtype, (*rows, columns * spec.element.bits // 8)),
            Entry(stored.scale_dtype, (*rows, columns // spec.block_size)),
            Entry(torch.float32, ()),
        )
        self._names |= dict.fromkeys(names, part)
        self.entries |= dict(zip(names, entries, strict=False))

    def _entry(self, part: str) -> Entry:
        source = self._sources[part]
        kind, shape, *_ = self._file.entries[source.name]
        return Entry(DTYPES.get(kind, torch.float32), shape if source.expert is None else shape[1:])

    def __getitem__(self, name: str) -> Tensor:
        part = self._names[name]
        if not isinstance(part, str):
            return self._merged(part)
        source = self._sources[part]
        if part not in self.packed:
            return self._values(source, self._blocks(source))
        row = self.packed[part]
        names = GGUF.names(part, row.form)
        if name == names[-1] and row.spec.has_tensor_scale:
            return self._tensor_scale(source)
        return row.to_codes(source.name, self._blocks(source))[names.index(name)]

    def slices(self, name: str, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield slices of a tensor along its rows, as `ShardReader.slices`."""
        part = self._names[name]
        if not isinstance(part, str) or part in self.packed or len(self.entries[name].shape) < 2:
            yield 0, self[name]
            return
        source = self._sources[part]
        blocks = self._blocks(source)
        step = max(1, SLICE // self.entries[name].row_bytes // multiple) * multiple
        for first in range(0, len(blocks), step):
            self._file.release()  # the memory of the slices before
            yield first, self._values(source, blocks[first : first + step])

    def _blocks(self, source: Source) -> Tensor:
        """Return the blocks of a part; of many experts only one is read."""
        self._file.release()
        return source.read(self._file.blocks(source.name))

    def _values(self, source: Source, blocks: Tensor) -> Tensor:
        if self._file.entries[source.name].type == NVFP4_TYPE:
            row = BLOCK_TYPES[NVFP4_TYPE]
            data, scale = row.to_codes(source.name, blocks)
            return dequantize_mx(data, scale, row.spec, tensor_scale=self._tensor_scale(source))
        values = self._file.values(source.name, blocks)
        return values - source.offset if source.offset else values

    def _merged(self, parts: Parts) -> Tensor:
        """Return a parameter of gpt-oss's experts, (E, K, N) or (E, N), of values of its parts."""
        merged: Any = None
        experts = set()
        for part, rows in parts.items():
            source = self._sources[part]
            values = self._values(source, self._blocks(source))
            if merged is None:
                merged = values.new_empty(sum(map(len, parts.values())), *values.shape[1:])
            merged[rows] = values
            experts.add(source.expert)
        merged = merged.unflatten(0, (len(experts), -1))
        return merged.mT if merged.dim() == 3 else merged

    def _tensor_scale(self, source: Source) -> Tensor:
        """Return the scale of a tensor in NVFP4, () float32; a file without it means 1."""
        name = source.scales[0]
        if name not in self._file.entries:
            return torch.ones(())
        return read_tensor_scale(name, self._file.values(name).view(-1)[source.expert or 0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def has_codes(path: Path) -> bool:
    """Return True for a file with weights whose codes are kept."""
    return any(entry.type in BLOCK_TYPES for entry in GGUFFile(path).entries.values())


def packed_gguf(path: Path) -> tuple[PreTrainedModel, Schemes, GGUFTensors, dict[str, Entry]]:
    """Return the model without its weights, and of the file its schemes, its tensors, and their dtypes and shapes."""
    file, skeleton = open_gguf(path)
    tensors = GGUFTensors(file, skeleton, lambda parameter, form: True)
    return skeleton, schemes_of(tensors), tensors, tensors.entries


def schemes_of(tensors: GGUFTensors) -> Schemes:
    """Return the schemes of the weights whose codes are kept."""
    # experts are looked up by the names of their tensors, other weights by those of their modules
    rules: Rules = [(partial(_is_of, part), Scheme(row.form)) for part, row in tensors.packed.items()]
    return Schemes(GGUF, rules)


def load_float_gguf(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the causal language model of a file with the values of its weights, by default in the half type of its
    floats, or float32 where it has other types."""
    file, skeleton = open_gguf(path)
    tensors = GGUFTensors(file, skeleton, lambda parameter, form: False)
    return with_tensors(skeleton, dtype or skeleton.dtype, tensors, f"{str(path)!r} holds another model")


def _is_of(part: str, name: str, kind: str) -> bool:
    return name in (part, part.rpartition(".")[0])


def open_gguf(path: Path) -> tuple[GGUFFile, PreTrainedModel]:
    """Return a file, and its model on the meta device."""
    file = GGUFFile(path)
    architecture_of(file)
    return file, skeleton_of(config_of(file), [entry.shape for entry in file.entries.values()], str(path))
