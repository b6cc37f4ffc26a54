"""The calls of a decoder's program: a prompt in chunks, then tokens one by one, each compiled for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: tokens of a prompt that are read at once, a bound on the memory of attention; many keep a GPU busy
_CHUNK = {"cpu": 1024, "cuda": 4096}
#: a compiled program reads prompts of a multiple of so many tokens on a GPU: each length has a CUDA graph of its own
_LENGTHS = 128


class Reader:
    """Reads tokens into a cache by a decoder's program.

    Args:
        decoder: `pt2mx.pt2e.language.decoder.CachedDecoder`, exported.
        device: that it runs on.
        packages: "prompt" and "token" -> what reads these in place of the decoder; none: there are none.
    """

    def __init__(
        self, decoder: Callable[..., Tensor], device: torch.device, packages: Mapping[str, Callable[..., Tensor]]
    ) -> None:
        self.decoder, self.device, self._pads = decoder, device, False
        self._prompt, self._token = packages.get("prompt", decoder), packages.get("token", decoder)

    def compile(self, **options: Any) -> None:
        """Compile the program when it first reads, for prompts of any length and for single tokens; `options` are those
        of `torch.compile`. Prompts have them too on a GPU, where a mode may ask for CUDA graphs."""
        self._pads = self.device.type == "cuda"
        self._prompt = torch.compile(self.decoder, dynamic=True, **(options if self._pads else {}))
        self._token = torch.compile(self.decoder, **options)

    def read(self, tokens: Tensor, positions: Tensor, mask: Tensor, kept: Tensor, cache: Any) -> Tensor:
        """tokens, positions: (B, S) int64, mask: (B, slots) int64, kept: (T,) int64, columns -> (B, T, vocabulary)
        logits of the columns that are kept. The cache is written."""
        length, size = tokens.shape[1], _CHUNK.get(self.device.type, _CHUNK["cpu"])
        if length <= size:
            return self._read(tokens, positions, mask, kept, cache)
        logits = []
        for first in range(0, length, size):
            here = slice(first, min(first + size, length))
            wanted = kept[(kept >= here.start) & (kept < here.stop)] - first
            logits.append(self._read(tokens[:, here], positions[:, here], mask, wanted, cache))
        by_chunk = (kept // size).argsort(stable=True)  # the order in which they were found
        return torch.cat(logits, 1)[:, by_chunk.argsort()]

    def _read(self, tokens: Tensor, positions: Tensor, mask: Tensor, kept: Tensor, cache: Any) -> Tensor:
        taken, length = cache.get_seq_length(), tokens.shape[1]
        more = -length % _LENGTHS if self._pads and length > 1 else 0
        if more and taken + length + more <= mask.shape[1]:  # what is written behind the last token is written again
            tokens, positions = F.pad(tokens, (0, more)), F.pad(positions, (0, more))
        program = self._prompt if length > 1 else self._token if len(kept) == 1 else self.decoder
        logits = program(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            start=torch.tensor([taken], device=self.device),
            logits_to_keep=kept,
            keys=[layer.keys for layer in cache.layers],
            values=[layer.values for layer in cache.layers],
        )
        for layer in cache.layers:
            layer.length += length
        return logits.clone() if self._pads else logits  # the next call of a CUDA graph writes there
