"""`LanguageModel`: a quantized decoder that generates text like a model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.fx.graph.tensors import device_named
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language.arguments import check_no_text, check_outputs, check_prompts, check_sampling
from pt2mx.pt2e.language.cache import KINDS
from pt2mx.pt2e.language.cache_name import CACHE, CACHE_NAMES
from pt2mx.pt2e.language.encoder import Encoder
from pt2mx.pt2e.language.encoder_decoder import class_for
from pt2mx.pt2e.language.folder import Folder, check_holds_program, load_folder, save_folder
from pt2mx.pt2e.language.generation import Generates
from pt2mx.pt2e.language.images import ReadsImages
from pt2mx.pt2e.language.layers import cache_of
from pt2mx.pt2e.language.merge_images import ImageInputs
from pt2mx.pt2e.language.positions import positions_of
from pt2mx.pt2e.language.runtime import Runner, load_packages, lower_program, write_packages
from pt2mx.pt2e.language.texts import padded_tokens
from pt2mx.pt2e.models.coverage import Coverage
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

_outputs = import_extra("transformers.modeling_outputs", "hf")


class LanguageModel(nn.Module, ReadsImages, Generates):
    """A quantized decoder with its cache, its configuration and its tokenizer.

    `generate` is the method of transformers, with its arguments and results: greedy search, sampling, beams, streamers,
    stopping criteria and `GenerationConfig`. With `text=` it takes and returns text.

    Args:
        program: the program of a decoder, quantized or float, with the signature of `CachedDecoder`.
        config: transformers' configuration of the model.
        generation_config: its settings for `generate`; None: transformers' defaults.
        tokenizer: the tokenizer for `text=`, or None; for a model that reads images its processor.
        encoder: the program whose outputs the decoder reads, such as a vision tower, or None.

    Raises:
        MXError: for a program that is no decoder with a cache.

    Example:
        >>> import tempfile, torch, transformers
        >>> from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = transformers.LlamaConfig(**sizes, vocab_size=128, bos_token_id=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> quantized = quantize_language_model(model, MXQuantizer.from_recipe("mxfp8"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     quantized.save_pretrained(folder)
        ...     loaded = LanguageModel.from_pretrained(folder)
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> options = dict(max_new_tokens=5, do_sample=False)
        >>> torch.equal(loaded.generate(prompt, **options), quantized.generate(prompt, **options))
        True
    """

    def __new__(cls, program: Any = None, config: Any = None, *args: Any, **kwargs: Any) -> LanguageModel:
        """Make a model of the class for programs with a source, or without."""
        # `copy` gives no arguments
        return super().__new__(cls if config is None else class_for(cls, config))

    def __init__(
        self,
        program: ExportedProgram,
        config: Any,
        generation_config: Any = None,
        tokenizer: Any = None,
        encoder: ExportedProgram | None = None,
    ) -> None:
        super().__init__()
        self.program, self.config = program, config
        self.processor = tokenizer if hasattr(tokenizer, "image_processor") else None
        self.tokenizer = tokenizer if self.processor is None else self.processor.tokenizer
        self.generation_config = generation_config or import_extra("transformers", "hf").GenerationConfig()
        self.layers, self.device, self.dtype = cache_of(program)
        self._is_stateful = not all(KINDS[name] for layer in self.layers for name in layer)
        self.encoder = None if encoder is None else Encoder(encoder, self.device)
        self._images = ImageInputs.of_program(program)
        self.coverage = Coverage({}, {})  #: the share of the checkpoint's values in the program; empty for a folder
        self._folder: Path | None = None

    @property
    def programs(self) -> list[ExportedProgram]:
        """The programs: of the encoder, if there is one, and of the decoder."""
        return [self.program] if self.encoder is None else [self.encoder.program, self.program]

    @cached_property
    def decoder(self) -> GraphModule:
        """The lowered program. The first access lowers it, so that saving a model does not."""
        return lower_program(self.program, self.device)

    @cached_property
    def runner(self) -> Runner:
        """Runs the decoder, or the packages of the folder where it has any."""
        packages = {} if self._folder is None else load_packages(self.decoder, self.device, self._folder)
        return Runner(self.decoder, self.device, packages)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The number of positions that the model knows, by what counts them; empty where there is no limit."""
        return positions_of(self.program)

    @classmethod
    def from_pretrained(cls, folder: Folder, device: str | None = None) -> LanguageModel:
        """Load a folder that `save_pretrained` or `pt2mx quantize` wrote; of a sharded model this rank's program.

        Args:
            folder: the folder with the program, the configuration and, optionally, the tokenizer.
            device: the device to run on; None: the device of the export.

        Returns:
            The model, not compiled.

        Raises:
            MXError: where the folder holds no such program, or one for another number of ranks.
        """
        model = cls(*load_folder(folder))
        model._folder = Path(folder)
        if device is not None:
            model.device = device_named(device)
            if model.encoder is not None:
                model.encoder.device = model.device
        return model

    def write_packages(self, folder: Folder) -> list[Path]:
        """Compile the model with AOTInductor, for its device, into packages in its folder.

        The packages hold no weights; they use the program's weights. `from_pretrained` loads them.

        Args:
            folder: a folder that `save_pretrained` wrote.

        Returns:
            The packages.

        Raises:
            MXError: where the folder holds no program, and for a sharded model.
        """
        check_holds_program(folder, self.program)
        return write_packages(self.decoder, self.layers, self._images, self.device, Path(folder))

    def save_pretrained(self, folder: Folder, recipe: MXQuantizer | str | None = None) -> None:
        """Write the program, the configurations and the tokenizer to a folder.

        Args:
            folder: the folder to write, which is made where it is missing.
            recipe: the quantizer of the model, or its YAML.

        Raises:
            MXError: where no file can be written there.
        """
        encoder = None if self.encoder is None else self.encoder.program
        parts = self.config, self.generation_config, self.processor or self.tokenizer
        save_folder(folder, self.program, recipe, *parts, encoder=encoder)

    def compile(self, **options: Any) -> None:
        """Compile the model in place, at the first prompt for any length, and at the first single token.

        Args:
            **options: options of `torch.compile` for single tokens, and on a GPU also for prompts.
        """
        self.runner.compile(**options)
        if self.encoder is not None:
            self.encoder.compile()

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        text: str | Sequence[str] | None = None,
        images: Any = None,
        **options: Any,
    ) -> Any:
        """Generate tokens, or with `text` generate text.

        Args:
            inputs: (B, S) int64 tokens, padded on the left.
            text: one prompt or several, instead of `inputs`.
            images: the images of `text`, as the processor takes them; the prompts hold its image token for each.
            **options: the options of transformers' `generate`, and what a processor gives for images.

        Returns:
            The result of transformers' `generate`. For `text` the generated strings, or one string for one prompt.

        Raises:
            MXError: for text without a tokenizer or in place of tokens, prompts that are no text, sampling options out
                of range, and options that ask for attention weights or hidden states.
        """
        check_no_text(inputs)
        check_sampling(options, self.generation_config)
        check_outputs(options, self.generation_config)
        options = {CACHE if name in CACHE_NAMES else name: value for name, value in options.items()}
        if self.tokenizer is not None:
            options = {"tokenizer": self.tokenizer, **options}  # stop_strings asks for it
        if text is None:
            if images is not None:
                raise MXError("images belong to text: give both, or pixel_values as the processor returns them")
            tokens = options.get("input_ids", inputs)
            return super().generate(inputs, **self._with_images_read(tokens, options.get("attention_mask"), options))
        prompts = check_prompts(text, inputs, options)
        tokens = self.tokens(prompts, images)
        options = self._with_images_read(tokens["input_ids"], tokens["attention_mask"], {**tokens, **options})
        output = super().generate(**options)
        first = 0 if self.config.is_encoder_decoder else tokens["input_ids"].shape[1]
        new = getattr(output, "sequences", output)[:, first:]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts[0] if isinstance(text, str) and len(texts) == 1 else texts

    def tokens(self, prompts: list[str], images: Any = None) -> dict[str, Tensor]:
        """Return the tokens of prompts for `generate`, padded on the left; for an encoder on the right.

        Args:
            prompts: the prompts.
            images: their images, as the processor takes them, or None.

        Returns:
            `input_ids` and `attention_mask`, (B, S) int64 on the model's device; with images also what the processor
            gives for them.

        Raises:
            MXError: without a tokenizer, or a processor for images; for a prompt without tokens; and for images that
                are not those of the prompts.
        """
        if images is None:
            tokens = padded_tokens(self.tokenizer, prompts, "right" if self.config.is_encoder_decoder else "left")
        elif self.processor is None:
            raise MXError("the model has no processor of images: give pixel_values, or save one in its folder")
        else:
            with user_errors("process the images"):
                padding = {"padding": True, "padding_side": "left"} if len(prompts) > 1 else {}
                tokens = dict(self.processor(text=prompts, images=images, return_tensors="pt", **padding))
        return {name: tensor.to(self.device) for name, tensor in tokens.items()}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        image_features: list[Tensor] | None = None,
        image_rows: Tensor | None = None,
        image_positions: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute logits as the model of transformers does; prompts are read in chunks.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, tokens in the cache + S), zero at padding, on the left; None: no padding.
            position_ids: (B, S) int64; None: computed from the mask.
            past_key_values: the cache from `new_cache` or an earlier call, changed in place; None: a new one.
            logits_to_keep: the number of last tokens whose logits to return, 0 for all; or (T,) int64, their columns.
            use_cache: False: do not return the cache.
            image_features, image_rows, image_positions: what `generate` makes of images; see `read_images`.
            cache: the newer name of `past_key_values`.
            **kwargs: what a processor gives for images; other arguments that `generate` passes have no effect.

        Returns:
            transformers' `CausalLMOutputWithPast`: logits (B, T, vocabulary), and the cache.

        Raises:
            MXError: for more tokens than fit into the cache or than the model has positions, tokens outside the
                vocabulary (on a GPU, of prompts), and for `output_attentions` and `output_hidden_states`.
        """
        check_outputs(kwargs)
        past = self._cache_for(input_ids, past_key_values if cache is None else cache)
        read = {"image_features": image_features, "image_rows": image_rows, "image_positions": image_positions}
        inputs, mask = self._inputs_of(input_ids, attention_mask, position_ids, past, {**kwargs, **read})
        columns = torch.arange(input_ids.shape[1], device=self.device)
        kept = columns[-logits_to_keep:] if isinstance(logits_to_keep, int) else columns[logits_to_keep].reshape(-1)
        logits = self.runner.read(inputs, mask, kept, past)
        return _outputs.CausalLMOutputWithPast(logits=logits, **{CACHE: None if use_cache is False else past})

    def train(self, mode: bool = True) -> LanguageModel:
        """Stay in evaluation mode.

        Args:
            mode: False, as in `eval`.

        Returns:
            The model.

        Raises:
            MXError: for True.
        """
        if mode:
            raise MXError("a quantized program is for inference: train a model with prepare_qat_pt2e")
        return self
