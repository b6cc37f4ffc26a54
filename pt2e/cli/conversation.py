"""A conversation with a language model: its turns, and the cache of the tokens that the model has read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pt2mx.pt2e.cli.answers import Answer
from pt2mx.pt2e.language.cache import CACHE, DecoderCache
from pt2mx.pt2e.language.language_model import LanguageModel

#: a turn of a conversation, as chat templates take it
Turn = dict[str, str]


class Conversation:
    """The turns of a conversation. The model reads each turn once: its cache keeps the tokens of the earlier ones.

    Args:
        model: the model that answers.
        system: the system message before the first turn, if any.
    """

    def __init__(self, model: LanguageModel, system: str | None) -> None:
        self.turns: list[Turn] = [{"role": "system", "content": system}] if system else []
        self._model, self._tokens = model, list[int]()
        self._cache: DecoderCache | None = None

    def cache_for(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the cache for a prompt, (1, S) int64, as an argument of `generate`.

        The cache keeps the tokens that the prompt begins with. The model reads an answer again if the chat template
        writes it in other tokens. A model with an encoder, or with recurrent layers, which cannot drop tokens, reads
        the whole prompt.
        """
        if self._model.config.is_encoder_decoder:
            return {}
        if self._cache is None:
            self._cache = self._model.new_cache(1, input_ids.shape[1])
        prompt, cache = input_ids[0].tolist(), self._cache
        pairs = zip(self._tokens[: cache.length], prompt[:-1], strict=False)  # the model reads at least one token
        same = next((i for i, (one, two) in enumerate(pairs) if one != two), min(cache.length, len(prompt) - 1))
        if same == 0 or not all(layer.is_croppable for layer in cache.layers):
            cache.reset()
        for layer in cache.layers if same < cache.length else ():
            layer.crop(same)
        self._tokens = prompt
        return {CACHE: cache}

    def add(self, prompt: str, answer: Answer) -> None:
        """Add a prompt and its answer as turns."""
        self.turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.text}]
        self._tokens += answer.tokens
