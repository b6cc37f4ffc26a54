"""Generate text from a source, tokens or audio: the encoder reads it once, and the decoder attends to the result."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.language.arguments import check_outputs, check_source
from pt2mx.pt2e.language.cache import CACHE, cache_in
from pt2mx.pt2e.language.encoder import Encoder
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.positions import check_positions
from pt2mx.pt2e.language.signature import example_inputs
from pt2mx.pt2e.language.source import EncoderOutput, decoder_inputs, encoder_results

_outputs = import_extra("transformers.modeling_outputs", "hf")
_whisper = import_extra("transformers.models.whisper.generation_whisper", "hf")


def _shift_bart(tokens: Tensor, config: Any) -> Tensor:
    module = import_extra("transformers.models.bart.modeling_bart", "hf")
    return module.shift_tokens_right(tokens, config.pad_token_id, config.decoder_start_token_id)


def _shift_mbart(tokens: Tensor, config: Any) -> Tensor:
    module = import_extra("transformers.models.mbart.modeling_mbart", "hf")
    return module.shift_tokens_right(tokens, config.pad_token_id)


#: model type -> the decoder's tokens that its model makes of a source, (B, S), if it gets no others
SHIFTS: dict[str, Callable[[Tensor, Any], Tensor]] = {"bart": _shift_bart, "mbart": _shift_mbart}


class EncoderDecoder(LanguageModel):
    """A `LanguageModel` that reads a source. `LanguageModel(...)` makes it for the program of an encoder-decoder."""

    encoder: Encoder

    @property
    def main_input_name(self) -> str:  # type: ignore[override]
        """The name of the source in transformers.

        Returns:
            "input_ids", "input_features" or "input_values".
        """
        return self.encoder.main_input_name

    def get_encoder(self, modality: str | None = None) -> Callable[..., EncoderOutput]:
        """Return the encoder as a function, which `get_encoder` of transformers returns as a module.

        Args:
            modality: without effect: there is one encoder.

        Returns:
            A function of the source and its mask, by position or by transformers' names. It returns what `encode` does.
        """

        def encode(source: Tensor | None = None, attention_mask: Tensor | None = None, **named: Any) -> EncoderOutput:
            check_outputs(named)
            return self.encode(named[self.main_input_name] if source is None else source, attention_mask)

        return encode

    def encode(self, source: Tensor, attention_mask: Tensor | None = None) -> EncoderOutput:
        """Encode tokens or audio.

        Args:
            source: (B, S) int64 tokens, (B, channels, time) features, or (B, time) samples.
            attention_mask: of tokens and samples, zero at padding; None: no padding.

        Returns:
            The output for `encoder_outputs` of `generate` and of calls.

        Raises:
            MXError: for a source that the encoder does not take, such as a token outside the vocabulary, or more tokens
                than it has positions.
        """
        expected = example_inputs(self.encoder.program)
        name = self.main_input_name
        vocabulary = self.config.get_text_config(encoder=True).vocab_size
        check_source(name, source, attention_mask, expected[name], vocabulary)
        check_positions(self.encoder.positions, 0, source)
        inputs = {name: source.to(self.device, expected[name].dtype)}
        if "attention_mask" in expected:
            mask = torch.ones_like(source, dtype=torch.long) if attention_mask is None else attention_mask.long()
            inputs["attention_mask"] = mask.to(self.device)
        return encoder_results(self.encoder(**inputs))

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_outputs: EncoderOutput | None = None,
        past_key_values: Any = None,
        input_features: Tensor | None = None,
        input_values: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the logits of the decoder's tokens as the model of transformers does.

        Args:
            input_ids, input_features, input_values: the source, as for `encode`; one of them.
            attention_mask: the mask of the source.
            decoder_input_ids: (B, S) int64; None, for BART and mBART: the source, shifted right.
            decoder_attention_mask: (B, tokens in the cache + S), zero at padding, on the left; None: no padding.
            decoder_position_ids: (B, S) int64; None: computed from the mask.
            encoder_outputs: the result of `encode`, instead of a source.
            past_key_values: the cache of an earlier call, whose source is read in place of another; None: a new one.
            use_cache: False: do not return the cache.
            cache: the newer name of `past_key_values`.
            **kwargs: other arguments that `generate` passes to models, without effect.

        Returns:
            transformers' `Seq2SeqLMOutput`: logits (B, S, vocabulary), and the cache.

        Raises:
            MXError: without a source, without tokens, and as `LanguageModel` does.
        """
        if decoder_input_ids is None:
            if input_ids is None or self.config.model_type not in SHIFTS:
                raise MXError("decoder_input_ids is missing: give the tokens with which the text begins")
            decoder_input_ids = SHIFTS[self.config.model_type](input_ids, self.config)
        past = self._cache_for(decoder_input_ids, past_key_values if cache is None else cache)
        sources = {"input_ids": input_ids, "input_features": input_features, "input_values": input_values}
        source = None if past.length else sources[self.main_input_name]
        if encoder_outputs is None and source is not None:
            encoder_outputs = self.encode(source, attention_mask)
        if encoder_outputs is not None and not isinstance(encoder_outputs, EncoderOutput):
            raise MXError(f"encoder_outputs must be the result of encode, not {type(encoder_outputs).__name__}")
        if encoder_outputs is not None and not past.length:
            past.set_source(decoder_inputs(encoder_outputs))
        if past.source_mask is None or not past.source_mask.numel():
            raise MXError(f"the source is missing: give {self.main_input_name}, or encoder_outputs")
        output = super().forward(
            decoder_input_ids, decoder_attention_mask, decoder_position_ids, past, use_cache=use_cache, **kwargs
        )
        return _outputs.Seq2SeqLMOutput(logits=output.logits, **{CACHE: cache_in(output)})

    def generate(self, inputs: Tensor | None = None, **options: Any) -> Any:
        """Generate text from a source.

        Args:
            inputs: the source, as for `encode`.
            **options: the options of transformers' `generate`, or `text`.

        Returns:
            The result of transformers' `generate`. For `text` the generated strings, or one string for one prompt.

        Raises:
            MXError: for `guidance_scale` with a model that makes no tokens of a source, and as `LanguageModel` does.
        """
        config = options.get("generation_config") or self.generation_config
        scale = options.get("guidance_scale", config.guidance_scale)
        if scale not in (None, 1) and self.config.model_type not in SHIFTS:
            raise MXError(
                f"guidance_scale={scale} calls the model with a source alone, of which only {' and '.join(SHIFTS)} "
                f"make the decoder's tokens, and {self.config.model_type} does not: leave it out"
            )
        return super().generate(inputs, **options)

    # a method that transformers' generate calls
    def _prepare_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs["encoder_outputs"] = self.encode(inputs_tensor, model_kwargs.get("attention_mask"))
        return model_kwargs

    #: its name since transformers 5.24
    _prepare_text_encoder_decoder_kwargs_for_generation = _prepare_encoder_decoder_kwargs_for_generation


class Whisper(EncoderDecoder, _whisper.WhisperGenerationMixin, LanguageModel):  # type: ignore[name-defined]
    """Transcribe audio with transformers' options: language, task, timestamps, and audio of any length.

    `generate` of transformers' Whisper calls the one of `LanguageModel` for each segment, so that class is the last."""

    #: the strides of the encoder's convolutions, which transformers reads
    model = SimpleNamespace(
        encoder=SimpleNamespace(conv1=SimpleNamespace(stride=(1,)), conv2=SimpleNamespace(stride=(2,)))
    )

    def generate(self, input_features: Tensor | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Transcribe features of audio.

        Args:
            input_features: (B, channels, time), as transformers' feature extractor makes them.
            **options: the options of transformers' `generate` for Whisper.

        Returns:
            The result of transformers' `generate`.

        Raises:
            MXError: for timestamps of tokens, which need the weights of attention.
        """
        if options.get("return_token_timestamps"):
            raise MXError("return_token_timestamps needs the weights of attention: give return_timestamps")
        return super().generate(input_features, **options)

    # a method that transformers' generate calls
    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(seek_outputs, Tensor):
            own = seek_outputs[CACHE].as_encoder_decoder_cache() if CACHE in seek_outputs else None
            seek_outputs = type(seek_outputs)(**{**seek_outputs, CACHE: own})
        return super()._postprocess_outputs(seek_outputs, *args, **kwargs)


def subclass_for(cls: type[LanguageModel], config: Any) -> type[EncoderDecoder]:
    """Return the class of a `LanguageModel` for the configuration of an encoder-decoder.

    Raises:
        MXError: for a subclass that reads no source.
    """
    subclass = Whisper if config.model_type == "whisper" else EncoderDecoder
    if issubclass(cls, subclass):
        return cls
    if cls is not LanguageModel:
        raise MXError(
            f"{cls.__name__} reads no source, which {config.model_type} needs: extend {subclass.__name__} of "
            f"{subclass.__module__} instead of LanguageModel"
        )
    return subclass
