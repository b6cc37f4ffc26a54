"""The files of a checkpoint: its configuration, its tensors, which are read one at a time, and their sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.safetensors_shards import Entry, Header, ShardReader, read_header

#: the configuration, the only file of tensors, and the index where there are several
CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: the configuration of ModelOpt
MODELOPT = "hf_quant_config.json"


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, with their dtypes."""

    dtypes: Mapping[str, torch.dtype]

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Read `count` rows of a tensor, from row `first` on."""
        return self[name][first : first + count]


class CheckpointTensors(StoredTensors):
    """The tensors of a folder. Each lookup reads its tensor into new memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.headers = folder, headers_of(folder)
        self._shards: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        for shard, header in self.headers.items():
            self._shards |= dict.fromkeys(header.entries, shard)
            self.entries |= header.entries
        self.dtypes = {name: entry.dtype for name, entry in self.entries.items()}

    def open(self, shard: str) -> ShardReader:
        """Open a file of the folder."""
        return ShardReader(self.folder / shard, self.headers[shard])

    def __getitem__(self, name: str) -> Tensor:
        with self.open(self._shards[name]) as reader:
            return reader.tensor(name)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        with self.open(self._shards[name]) as reader:
            return reader.rows(name, first, count)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` in config.json or in ModelOpt's file; None where the checkpoint has none."""
    config = read_json(folder / CONFIG).get("quantization_config")
    if config is None and (folder / MODELOPT).is_file():
        return {"quant_method": "modelopt", **read_json(folder / MODELOPT)}
    if not isinstance(config, dict | None):
        raise MXError(f"cannot read {str(folder / CONFIG)!r}: its quantization_config {config!r} is no JSON object")
    return config


def headers_of(folder: Path) -> dict[str, Header]:
    """Return the files that hold the tensors of a checkpoint, with their headers."""
    index = folder / INDEX
    shard_of: dict[str, str] = {}
    shards = [WHOLE]
    if index.is_file():
        shard_of = _weight_map(index)
        shards = sorted(set(shard_of.values()))
    elif not (folder / WHOLE).is_file():
        raise MXError(f"{str(folder)!r} holds neither {WHOLE} nor {INDEX}: give a checkpoint of safetensors")
    for shard in shards:
        if not os.path.isfile(folder / shard):  # False for a name that no file can have, too
            raise MXError(f"{str(index)!r} names {shard!r}, which is not there: fetch the missing shards")
    headers = {shard: read_header(folder / shard) for shard in shards}
    _check_index(index, shard_of, headers)
    return headers


def _check_index(index: Path, shard_of: dict[str, str], headers: dict[str, Header]) -> None:
    """Raise an `MXError` for a tensor that the file of the index lacks, or that another file has too."""
    for name, shard in shard_of.items():
        if name not in headers[shard].entries:
            raise MXError(f"{str(index)!r} has {name} in {shard!r}, which lacks it: fetch {shard!r} again")
    for shard, header in headers.items():
        for name in header.entries:
            if shard_of.setdefault(name, shard) != shard:
                raise MXError(
                    f"{name} is in {shard_of[name]!r} and in {shard!r}: {str(index.parent)!r} holds files of two "
                    "checkpoints; fetch it again"
                )


def _weight_map(index: Path) -> dict[str, str]:
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise MXError(f"cannot read {str(index)!r}: it has no weight_map that says where each tensor is")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise MXError(
                f"{str(index)!r} has {name} in {shard!r}, which is no file of its folder: put all shards there"
            )
    return shard_of


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MXError(f"{str(path.parent)!r} holds no {path.name}: give the folder of a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MXError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(content, dict):
        raise MXError(f"cannot read {str(path)!r}: it holds no JSON object")
    return content


#: the files of a checkpoint that transformers looks for, in its order
_FILES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def files_of(name: str | os.PathLike[str]) -> list[Path]:
    """Return the files with the tensors of a checkpoint, a folder or a name on the hub, after transformers has loaded
    it; none where the tensors are in files of another kind."""
    hub = import_extra("transformers.utils.hub", "hf")
    silenced = ("connection_errors", "gated_repo", "missing_entries")
    options = {f"_raise_exceptions_for_{what}": False for what in silenced}
    for file in _FILES:
        path = hub.cached_file(os.fspath(name), file, local_files_only=True, **options)
        if path:
            shards = sorted(set(read_json(Path(path))["weight_map"].values())) if file.endswith(".json") else [file]
            return [Path(path).parent / shard for shard in shards]
    return []


def entries_in(files: Iterable[str | os.PathLike[str]]) -> dict[str, Entry]:
    """Return the dtype and the shape of each tensor in files of safetensors or of `torch.save`, without its values."""
    entries: dict[str, Entry] = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            entries |= read_header(file).entries
        else:
            # torch maps no file of its format before 1.6
            state = torch.load(file, map_location="meta", mmap=is_zipfile(file), weights_only=True)
            entries |= {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return entries
