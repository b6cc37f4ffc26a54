"""Read the checkpoints that a conversion takes: folders of safetensors, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.configs import read_config
from pt2mx.pt2e.checkpoints.recode import alike_form
from pt2mx.pt2e.models.build_model import model_on_meta
from pt2mx.pt2e.models.checkpoint_files import (
    CONFIG,
    WHOLE,
    CheckpointTensors,
    StoredTensors,
    quantization_of,
    read_json,
)
from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.gguf_tensors import GGUFTensors, has_codes, open_gguf, schemes_of
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import EMBEDDING, EXPERTS, Schemes, weights_of
from pt2mx.pt2e.models.safetensors_shards import Entry, ShardReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: bytes of a shard that is made of a GGUF file
_SHARD = 1 << 30


class FolderShards:
    """The shards of a folder; what is written has shards of the same names.

    Attributes:
        entries: shard -> its tensors.
        files: the files that are read.
    """

    def __init__(self, tensors: CheckpointTensors) -> None:
        self.entries = {shard: header.entries for shard, header in tensors.headers.items()}
        self.files = [tensors.folder / shard for shard in self.entries]
        self.open = tensors.open


class GGUFShards:
    """The tensors of a GGUF file in shards of a size at which an interrupted run loses little; see `FolderShards`."""

    def __init__(self, file: Path, tensors: GGUFTensors) -> None:
        groups: list[dict[str, Entry]] = [{}]
        size = 0
        for name, entry in tensors.entries.items():
            if size and size + entry.nbytes > _SHARD:
                groups.append({})
                size = 0
            groups[-1][name] = entry
            size += entry.nbytes
        names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        self.entries = dict(zip(names if len(groups) > 1 else [WHOLE], groups, strict=True))
        self.files = [file]
        self._tensors = tensors

    @contextmanager
    def open(self, shard: str) -> Iterator[_GGUFReader]:
        yield _GGUFReader(self.entries[shard], self._tensors)


class _GGUFReader:
    """Reads the tensors of a shard, as `ShardReader`."""

    def __init__(self, entries: dict[str, Entry], tensors: GGUFTensors) -> None:
        self.entries: dict[str, Entry] = entries
        self.metadata: dict[str, str] = {}
        self.slices, self.tensor = tensors.slices, tensors.__getitem__


Shards = FolderShards | GGUFShards
Reader = ShardReader | _GGUFReader


class Source(NamedTuple):
    """A checkpoint to convert.

    Args:
        path: the folder or the file.
        config: the content of its config.json.
        model: its model on the meta device.
        shards: its shards.
        schemes: the schemes that it states; None: it is in high precision.
        tensors: its tensors by name.
    """

    path: Path
    config: dict[str, Any]
    model: PreTrainedModel
    shards: Shards
    schemes: Schemes | None
    tensors: StoredTensors


def read_source(path: Path, layout: Layout, keep_codes: bool) -> Source:
    """Read the headers of a checkpoint.

    Args:
        path: a folder of safetensors, or a GGUF file.
        layout: the layout into which it is converted: weights of other formats in a GGUF file become values.
        keep_codes: False: all tensors of a GGUF file are values.

    Raises:
        MXError: where it cannot be read.
    """
    if (file := gguf_in(path)) is not None:
        return _gguf_source(file, layout, keep_codes and has_codes(file))
    config, quantization = read_json(path / CONFIG), quantization_of(path)
    schemes = read_config(quantization) if quantization else None
    if schemes is not None and schemes.transforms:
        raise MXError(
            f"{str(path)!r} multiplies inputs or outputs as the model runs (transform_config), which a conversion from "
            "file to file does not keep: load it with `pt2mx quantize`, and save it with `pt2mx save-checkpoint`"
        )
    tensors = CheckpointTensors(path)
    shapes = [entry.shape for entry in tensors.entries.values()]
    model = model_on_meta(path, {**config, "quantization_config": None} if quantization else config, shapes)
    return Source(path, config, model, FolderShards(tensors), schemes, tensors)


def _gguf_source(path: Path, layout: Layout, keep_codes: bool) -> Source:
    file, model = open_gguf(path)
    kinds = weights_of(model)

    def keeps(parameter: str, form: str) -> bool:
        kind = kinds.get(parameter)
        if not keep_codes or (layout.only_experts and kind != EXPERTS):
            return False
        return alike_form(form, layout.embeddings if kind == EMBEDDING else layout.stored) is not None

    tensors = GGUFTensors(file, model, keeps)
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    return Source(path, config, model, GGUFShards(path, tensors), schemes_of(tensors) if keep_codes else None, tensors)
