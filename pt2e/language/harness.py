"""`HarnessModel`: a quantized language model for the tasks of EleutherAI's lm-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.scoring import context_length, continuations, log_likelihoods, rolling_pairs

_model = import_extra("lm_eval.api.model", "eval")

#: names of tasks for the number of new tokens, and the number without one
_NEW_TOKENS, _DEFAULT_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), 256


class HarnessModel(_model.TemplateLM):  # type: ignore[name-defined]
    """A language model with its tokenizer, as `lm_eval.simple_evaluate(model=...)` takes it.

    Prompts are the prompts of lm-eval's own model `hf`. Where a text is longer than `max_length`, the model reads its
    end. Batches of another size give the same results but for the order of sums.

    Args:
        model: the model, with its tokenizer.
        batch_size: the number of texts that the model reads at once.
        max_length: the number of tokens that it reads at most; None: what its configuration allows.

    Raises:
        MXError: for a model without a tokenizer, one that does not continue texts, and numbers below 1.
    """

    def __init__(self, model: LanguageModel, batch_size: int = 1, max_length: int | None = None) -> None:
        super().__init__()
        if model.tokenizer is None:
            raise MXError("the model has no tokenizer: save one in its folder")
        if model.config.is_encoder_decoder:
            raise MXError(f"a {model.config.model_type} answers a text and does not continue it: give a decoder")
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise MXError(f"{name}={value} must be at least 1")
        self.model, self.tokenizer, self.batch_size = model, model.tokenizer, batch_size
        self.max_length = max_length or context_length(model)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text; a chat template may have written the token of its beginning already."""
        first = self.tokenizer.bos_token
        special = not (first and string.startswith(first)) if add_special_tokens is None else add_special_tokens
        return self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.tokenizer.chat_template is None:
            raise MXError("the tokenizer has no chat template: evaluate the model without one")
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(self._end_of(context, len(answer) - 1), answer) for _, context, answer in requests]
        return log_likelihoods(self.model, pairs, self.batch_size)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        pairs = [(index, *pair) for index, text in enumerate(texts) for pair in self._rolling_pairs(text)]
        sums = [0.0] * len(texts)
        for (index, _, _), (value, _) in zip(pairs, self._loglikelihood_tokens(pairs), strict=True):
            sums[index] += value
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        results = [""] * len(requests)
        for text, indices in groups.items():
            stops, length, options = _generate_options(json.loads(text))
            prompts = [self.tok_encode(requests[index].args[0]) or [self.prefix_token_id] for index in indices]
            prompts = [self._end_of(prompt, length) for prompt in prompts]
            answers = continuations(self.model, prompts, stops, length, self.batch_size, **options)
            for index, answer in zip(indices, answers, strict=True):
                results[index] = answer
        return results

    def _rolling_pairs(self, tokens: list[int]) -> list[tuple[list[int], list[int]]]:
        return list(rolling_pairs(tokens, self.prefix_token_id, self.max_length))

    def _end_of(self, tokens: list[int], others: int) -> list[int]:
        """Return the last tokens that the model can read together with others."""
        if others >= self.max_length:
            raise MXError(
                f"{others} tokens do not fit into the {self.max_length} tokens that the model reads: give a larger "
                "max_length, or let the task generate fewer"
            )
        return tokens[-(self.max_length - others) :]


def _generate_options(given: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Return the stop strings of a task, the number of new tokens and the options of `generate`."""
    options = dict(given)
    stops = options.pop("until", None) or []
    lengths = [options.pop(name) for name in _NEW_TOKENS if name in options]
    samples = options.pop("do_sample", bool(options.get("temperature")))
    if not samples:  # they have no meaning
        options |= dict.fromkeys(("temperature", "top_k", "top_p"))
    stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
    return stops, int(next(iter(lengths), _DEFAULT_NEW_TOKENS)), {"do_sample": samples, **options}
