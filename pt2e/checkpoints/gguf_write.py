"""Write a GGUF file tensor by tensor, so that tensors need not fit into memory and an interrupted run can continue."""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.gguf_metadata import add_metadata, architecture_named, check_config
from pt2mx.pt2e.checkpoints.gguf_tokenizer import add_tokenizer
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.gguf_file import SUFFIX, GGUFFile
from pt2mx.pt2e.models.gguf_model import ROPE_TENSORS

#: tensors begin at multiples of so many bytes
_ALIGNMENT = 32
#: type that most weights have -> llama.cpp's name of the file's type, where that is not MOSTLY_<type>
_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write.

    Args:
        type: the name of its type.
        shape: the shape of its values, in torch's order.
        chunks: the function that yields its blocks or values in order, as tensors of any shape.
    """

    type: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        block, size = _gguf().GGML_QUANT_SIZES[_gguf().GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // block * size

    @property
    def padded(self) -> int:
        """The bytes of the tensor up to the next one."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


def header_of(config: Any, tensors: Mapping[str, FileTensor], tokenizer: Any) -> bytes:
    """Return the bytes of a file that come before its tensors.

    Args:
        config: transformers' configuration.
        tensors: the tensors by their names in the file, those that scale RoPE first.
        tokenizer: the tokenizer, or a `GGUFFile` to copy it from; None: the file has no vocabulary.

    Raises:
        MXError: for a configuration that the header cannot state, and where the temporary folder holds no header.
    """
    gguf = _gguf()
    with user_errors("make the header of a GGUF file"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"header{SUFFIX}"
        writer = gguf.GGUFWriter(path, architecture_named(config))
        try:
            add_metadata(writer, config)
            add_tokenizer(writer, tokenizer, config.get_text_config().vocab_size)
            kinds = Counter(tensor.type for tensor in tensors.values() if len(tensor.shape) > 1)
            kind = kinds.most_common(1)[0][0]
            writer.add_file_type(int(gguf.LlamaFileType[_FILE_TYPES.get(kind, f"MOSTLY_{kind}")]))
            for name, tensor in tensors.items():
                number = gguf.GGMLQuantizationType[tensor.type]
                writer.add_tensor_info(name, tensor.shape, float, tensor.nbytes, raw_dtype=number)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        header = path.read_bytes()
        header += bytes(-len(header) % _ALIGNMENT)
        # the configuration is read back before any weight is written
        with path.open("wb") as file:
            write_tensors(file, header, {name: tensors[name] for name in ROPE_TENSORS if name in tensors})
        check_config(GGUFFile(path, len(header) + sum(tensor.padded for tensor in tensors.values())), config)
    return header


def write_tensors(
    file: IO[bytes],
    header: bytes,
    tensors: Mapping[str, FileTensor],
    finished: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Write a file, or continue one that an interrupted run began with the same header.

    Args:
        file: the file.
        header: the bytes that come before the tensors.
        tensors: the tensors in order.
        finished: called with the name of each finished tensor.

    Returns:
        The tensors that the file contained already.
    """
    length, end = file.seek(0, os.SEEK_END), len(header)
    kept = []
    if length < end:
        file.seek(0)
        file.write(header)
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.padded
        if end <= length:
            kept.append(name)
        else:
            file.seek(begin)
            for chunk in tensor.chunks():
                file.write(chunk.contiguous().view(-1).view(torch.uint8).numpy().data)
            if (written := file.tell() - begin) != tensor.nbytes:
                raise MXError(f"{name} gave {written} bytes, but the header of the file says {tensor.nbytes}")
            file.write(bytes(end - file.tell()))
        finished(name)
    return kept


def _gguf() -> Any:
    return import_extra("gguf", "gguf")
