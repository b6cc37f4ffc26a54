"""The files of a checkpoint: its configuration, and tensors that are read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.safetensors_shards import Entry, ShardReader

#: the configuration, the tensors where they are in one file, and what says in which of several each is
CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: ModelOpt's own file
MODELOPT = "hf_quant_config.json"


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name. Each is read when it is asked for, into memory of its own.

    Args:
        folder: with the files.

    Raises:
        MXError: as `headers_of`.
    """

    def __init__(self, folder: Path) -> None:
        shards = headers_of(folder).items()
        self._place = {name: folder / shard for shard, header in shards for name in header.entries}

    def __getitem__(self, name: str) -> Tensor:
        with ShardReader(self._place[name]) as reader:
            return reader.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint, as config.json or ModelOpt's own file has it; None where it has none.

    Raises:
        MXError: where config.json is not there or cannot be read.
    """
    found = read_json(folder / CONFIG).get("quantization_config")
    if found is None and (folder / MODELOPT).is_file():
        return {"quant_method": "modelopt", **read_json(folder / MODELOPT)}
    if not isinstance(found, dict | None):
        raise MXError(f"cannot read {str(folder / CONFIG)!r}: its quantization_config {found!r} is no JSON object")
    return found


class Header(NamedTuple):
    """The header of a shard: its tensors by name, and the strings of its metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def headers_of(folder: Path) -> dict[str, Header]:
    """Return the files that hold the tensors of a checkpoint, with the header of each.

    Raises:
        MXError: where there are none, one is missing or not whole, and where the index and the headers disagree about
            the file of a tensor.
    """
    index = folder / INDEX
    if index.is_file():
        places = _places_in(index)
    elif (folder / WHOLE).is_file():
        places = {}
    else:
        raise MXError(f"{str(folder)!r} holds neither {WHOLE} nor {INDEX}: give a checkpoint of safetensors")
    shards = sorted(set(places.values())) if index.is_file() else [WHOLE]
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise MXError(f"{str(index)!r} names {missing[0]!r}, which is not there: fetch the missing shards")
    headers = {}
    for shard in shards:
        with ShardReader(folder / shard) as reader:
            headers[shard] = Header(reader.entries, reader.metadata)
    _check_index(index, places, headers)
    return headers


def _check_index(index: Path, places: dict[str, str], headers: dict[str, Header]) -> None:
    """Raise an error for a tensor that is not in the file that the index names, or in another one too."""
    for name, shard in places.items():
        if name not in headers[shard].entries:
            raise MXError(f"{str(index)!r} has {name} in {shard!r}, which lacks it: fetch {shard!r} again")
    for shard, header in headers.items():
        for name in header.entries:
            if places.setdefault(name, shard) != shard:
                raise MXError(
                    f"{name} is in {places[name]!r} and in {shard!r}: {str(index.parent)!r} holds files of two "
                    "checkpoints; fetch it again"
                )


def _places_in(index: Path) -> dict[str, str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise MXError(f"cannot read {str(index)!r}: it has no weight_map that says where each tensor is")
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise MXError(f"{str(index)!r} has {name} in {shard!r}, which is no file beside it: put all shards there")
    return places


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        MXError: where there is no such file, or something else in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MXError(f"{str(path.parent)!r} holds no {path.name}: give the folder of a checkpoint") from None
    except (OSError, ValueError) as error:
        raise MXError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(content, dict):
        raise MXError(f"cannot read {str(path)!r}: it holds no JSON object")
    return content
