"""`LanguageModel`: a quantized decoder that generates text like a model of transformers."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.arguments import (
    LONGEST_TEXT,
    NEW_TOKENS,
    asked_tokens,
    check_length,
    check_mask,
    check_no_text,
    check_outputs,
    check_prompts,
    check_sampling,
    check_step,
    check_tokens,
    check_vocabulary,
    default_tokens,
    inferred_mask,
    may_end,
)
from pt2mx.pt2e.language.cache import CACHE, CACHE_NAMES, KINDS, DecoderCache, empty_cache, room_for
from pt2mx.pt2e.language.encoder import Encoder
from pt2mx.pt2e.language.folder import (
    Folder,
    check_holds_program,
    load_folder,
    read_documents,
    save_folder,
    write_documents,
)
from pt2mx.pt2e.language.images import check_number, inputs_of_next_tokens, read_images
from pt2mx.pt2e.language.layers import cache_of
from pt2mx.pt2e.language.merge_images import ROWS, ImageInputs
from pt2mx.pt2e.language.positions import POSITION_IDS, Room, check_positions, positions_of, room_of
from pt2mx.pt2e.language.ranks import is_first, program_file
from pt2mx.pt2e.language.rope import rope_positions
from pt2mx.pt2e.language.runtime import Runner, load_packages, lower_program, write_packages
from pt2mx.pt2e.language.sampling import Choice, processors_of
from pt2mx.pt2e.language.step import Step, Stopping, choose_tokens
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.language.texts import padded_tokens
from pt2mx.pt2e.language.vision import IMAGES, tower_of
from pt2mx.pt2e.models.coverage import Coverage
from pt2mx.pt2e.models.hub import fetch, is_repository, make_repository, upload
from pt2mx.pt2e.program.build_program import can_become_program, program_of
from pt2mx.pt2e.program.provenance import recipe_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

_generation = import_extra("transformers.generation.utils", "hf")
_outputs = import_extra("transformers.modeling_outputs", "hf")


class LanguageModel(nn.Module, _generation.GenerationMixin):  # type: ignore[name-defined]
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

    main_input_name, base_model_prefix, _is_stateful = "input_ids", "", False
    #: the step of the last call of `generate`, if it is captured, with its cache
    _step: Step | None = None
    # methods of transformers, which mypy takes for tensors of a module
    _prefill: Any
    _update_model_kwargs_for_generation: Any
    prepare_inputs_for_generation: Any

    def __new__(cls, program: Any = None, config: Any = None, *args: Any, **kwargs: Any) -> LanguageModel:
        """Make a model of the subclass that reads a source where the configuration is of an encoder-decoder."""
        if config is not None and config.is_encoder_decoder:  # `copy` gives no arguments
            from pt2mx.pt2e.language.encoder_decoder import subclass_for  # it extends this class

            cls = subclass_for(cls, config)
        return super().__new__(cls)

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
        self.generation_config = generation_config or _generation.GenerationConfig()
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
    def from_pretrained(
        cls,
        folder: Folder,
        device: str | None = None,
        *,
        revision: str | None = None,
        token: bool | str | None = None,
        cache_dir: Folder | None = None,
        local_files_only: bool = False,
    ) -> LanguageModel:
        """Load a folder that `save_pretrained` or `pt2mx quantize` wrote; of a sharded model this rank's program.

        Args:
            folder: the folder with the program, the configuration and, optionally, the tokenizer; or the name of a
                repository of the Hub, `owner/name`, which is fetched to its cache. The other arguments are for a name.
            device: the device to run on; None: the device of the export.
            revision: the branch, tag or commit; None: the main branch.
            token: a token of the Hub; None or True: the one that `hf auth login` stored; False: none.
            cache_dir: the folder of the cache; None: the one of the Hub.
            local_files_only: True: take what is in the cache, and do not connect.

        Returns:
            The model, not compiled.

        Raises:
            MXError: where the folder holds no such program, or one for another number of ranks; for a repository that
                is neither in the cache nor can be fetched.
        """
        if is_repository(folder):
            of_hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
            folder = fetch(str(folder), revision, **of_hub)
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
        """Write the program, the configurations, the tokenizer and the model card to a folder.

        A README.md that pt2mx did not write stays. The files with the license of the float model are copied.

        Args:
            folder: the folder to write, which is made where it is missing.
            recipe: the quantizer of the model, or its YAML; None: the one of the folder that the model was loaded from.

        Raises:
            MXError: where no file can be written there.
        """
        self._save(folder, recipe)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        recipe: MXQuantizer | str | None = None,
        commit_message: str = "Upload a model quantized by pt2mx",
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> Any:
        """Upload the files that `save_pretrained` writes to a repository of the Hub, which is made where it is missing.

        Args:
            repo_id: the repository, `owner/name`; without an owner it is yours.
            recipe: as for `save_pretrained`.
            commit_message, commit_description: the text of the commit.
            private: True: make a private repository; None: as the owner's settings say. One that is there stays as it
                is.
            token: a token of the Hub; None or True: the one that `hf auth login` stored.
            revision: the branch; None: the main branch.
            create_pr: True: make a pull request.

        Returns:
            The `CommitInfo` of huggingface_hub: its `commit_url`, and with `create_pr` its `pr_url`.

        Raises:
            MXError: where the Hub cannot be reached, or refuses the name or the token; for a sharded model.
        """
        if is_shard(self.program):
            raise MXError("each rank has a part of the model: call save_pretrained on each, then `hf upload`")
        repository = make_repository(repo_id, private, token, revision)
        commit = {"commit_message": commit_message, "commit_description": commit_description}
        with tempfile.TemporaryDirectory() as folder:
            self._save(folder, recipe, repository)
            return upload(folder, repository, token, revision=revision, create_pr=create_pr, **commit)

    def _save(self, folder: Folder, recipe: MXQuantizer | str | None, name: str | None = None) -> None:
        """Write the model to a folder; its card calls it by a name, or None: by the name of the folder."""
        kept, sharded = {}, is_shard(self.program)
        if self._folder is not None:
            kept = read_documents(self._folder)
            recipe = recipe or recipe_of(self._folder / program_file(sharded))
        encoder = None if self.encoder is None else self.encoder.program
        parts = self.config, self.generation_config, self.processor or self.tokenizer
        save_folder(folder, self.program, recipe, *parts, encoder=encoder)
        if is_first() or not sharded:
            base = "" if self._folder is not None else self.config._name_or_path
            write_documents(folder, kept, recipe, base, name)

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
            The result of transformers' `generate`. For `text` the generated strings, or one string for one prompt. A
            text that would go beyond the positions of the model ends there, with a warning.

        Raises:
            MXError: for text without a tokenizer or in place of tokens, prompts that are no text, sampling options out
                of range, options that ask for attention weights or hidden states, prompts that are longer than the
                positions of the model, and more new tokens than those leave where nothing else ends the text.
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
            return self._generate(inputs, options.get("input_ids", inputs), options.get("attention_mask"), options)
        prompts = check_prompts(text, inputs, options)
        tokens = self.tokens(prompts, images)
        output = self._generate(None, tokens["input_ids"], tokens["attention_mask"], {**tokens, **options})
        first = 0 if self.config.is_encoder_decoder else tokens["input_ids"].shape[1]
        new = getattr(output, "sequences", output)[:, first:]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts[0] if isinstance(text, str) and len(texts) == 1 else texts

    def _generate(self, inputs: Tensor | None, tokens: Any, mask: Tensor | None, options: dict[str, Any]) -> Any:
        """Generate as transformers does, within the positions of the model; `tokens` and `mask` are those of prompts.

        Raises:
            MXError: for a prompt that is longer than the positions of the model, and for more tokens where the text
                cannot end earlier. Other texts end at the last position, with a warning.
        """
        given, defaults = options.get("generation_config"), self.generation_config
        infers = isinstance(tokens, Tensor) and mask is None
        known = inferred_mask(tokens, options, given, defaults) if infers else mask
        room = None if tokens is None else self.room(tokens, known)
        if room is None:
            return super().generate(inputs, **self._with_images_read(tokens, mask, options))
        length = tokens.shape[1]
        asked = asked_tokens({**(vars(given) if given else {}), **options}, length)
        room.check(0 if asked is None or may_end(options, given, defaults) else asked, "max_new_tokens=")
        number = asked_tokens(vars(defaults), length) if asked is None else asked
        own = default_tokens(self.config, length) if number is None else number  # what transformers takes
        wanted = NEW_TOKENS if number is None and own < 1 else own
        most = min(wanted, room.new_tokens)
        if most != own:
            options = {**options, "max_new_tokens": most, "max_length": None}
        output = super().generate(inputs, **self._with_images_read(tokens, mask, options))
        if most != wanted and getattr(output, "sequences", output).shape[1] == length + room.new_tokens:
            text = f"{room.new_tokens} of {wanted} new tokens: the model has {room.positions} positions"
            warnings.warn(f"the text ends after {text}", stacklevel=4)
        return output

    def room(self, tokens: Tensor, mask: Tensor | None = None) -> Room | None:
        """Return the room that prompts leave for new tokens.

        Args:
            tokens: (B, S) int64, the prompts.
            mask: (B, S) int64, zero at padding; None: no padding.

        Returns:
            A `Room`: `new_tokens`, the most tokens that fit behind the longest prompt; `prompt`, its tokens; `row`, its
            row; and `positions`, those of the model: of its tables, those that its RoPE was made for, or the length
            that it was quantized for. None for a model without a limit, and for an encoder-decoder.

        Raises:
            MXError: for anything but tokens, no token, and a mask of other sequences.
        """
        if self.config.is_encoder_decoder:
            return None
        check_mask(mask, check_tokens(tokens))
        return room_of(self._limits, tokens, mask)

    @cached_property
    def _limits(self) -> dict[str, int]:
        longest = getattr(self.config, LONGEST_TEXT, None)
        limits = {POSITION_IDS: rope_positions(self.config), LONGEST_TEXT: longest, **self.positions}
        return {name: limit for name, limit in limits.items() if limit is not None}

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

    def new_cache(self, batch: int, tokens: int) -> DecoderCache:
        """Make an empty cache for `past_key_values`.

        Args:
            batch: the number of sequences.
            tokens: the number of tokens of each that must fit.

        Returns:
            transformers' `Cache`.
        """
        cache = empty_cache(self.layers, batch, room_for(tokens), self.device)
        for tensor in (tensor for layer in cache.layers for tensor in layer.tensors):
            torch._dynamo.mark_static_address(tensor)  # lets CUDA graphs write to them
        return cache

    def training_inputs(self, tokens: Tensor) -> dict[str, Any]:
        """Return the inputs by name with which a graph of the program reads whole texts, as `pt2mx.add_lora` gives one.

        Args:
            tokens: (B, S) int64, without padding.

        Returns:
            The tokens and their positions, the columns of all logits, and an empty cache for one call.

        Raises:
            MXError: for anything but tokens of the vocabulary, and for an encoder-decoder.
        """
        if self.config.is_encoder_decoder:
            raise MXError("a decoder that reads a source is not trained here: take a decoder of text alone")
        check_tokens(tokens)
        check_vocabulary("tokens", tokens, self.config.get_text_config(decoder=True).vocab_size)
        return decoder.inputs(self.layers, self.device, tokens, images=self._images)

    def with_graph(self, graph: GraphModule) -> LanguageModel:
        """Return a model that generates with a graph of its program.

        Args:
            graph: what `pt2mx.add_lora`, `load_lora` or `merge_lora` made of `program`, for the same inputs. It does
                not change; the model shares its tensors.

        Returns:
            The model, with this one's configuration, tokenizer and encoder. It generates, and can be saved, with the
            bits of the graph.
        """
        example = decoder.inputs(self.layers, self.device, images=self._images)
        traced = not can_become_program(graph, self.program)
        program = decoder.export(graph, example) if traced else program_of(graph, self.program, example)
        encoder = None if self.encoder is None else self.encoder.program
        return LanguageModel(program, self.config, self.generation_config, self.processor or self.tokenizer, encoder)

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
            raise MXError("a quantized program is for inference: see pt2mx.add_lora and prepare_qat_pt2e")
        return self

    def _inputs_of(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: DecoderCache,
        given: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the inputs of the program for the next tokens, (B, S), and the mask, (B, slots) int64.

        Raises:
            MXError: for more tokens than fit into the cache or than the model has positions, a token outside the
                vocabulary, and a mask or positions of other shapes.
        """
        filled, slots = cache.length, cache.slots
        check_step(input_ids, attention_mask, position_ids, cache.batch_size, filled, slots)
        check_length(self.config, filled + input_ids.shape[1])
        batch, length = input_ids.shape
        # later tokens are mostly the model's own, and a GPU would wait for the check
        if (length > 1 or not filled or input_ids.device.type == "cpu") and self._images is None:
            check_vocabulary("input_ids", input_ids, self.config.get_text_config(decoder=True).vocab_size)
        gives_positions = position_ids is not None
        mask = torch.ones(batch, slots, dtype=torch.long, device=self.device)
        if attention_mask is not None:
            mask[:, : attention_mask.shape[1]] = attention_mask
        if position_ids is None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, filled : filled + length]
        check_positions(self.positions, filled, position_ids, gives_positions)
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        return inputs | self._image_inputs(given, inputs, mask, cache), mask

    def _with_images_read(self, tokens: Any, mask: Tensor | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments in which the image inputs for tokens, (B, S), take the place of what a processor gives."""
        if self._images is None or self.encoder is None:
            if given.get(IMAGES) is not None:
                raise MXError("the model reads text alone: for images, quantize it whole, without --part (part=None)")
            return dict(given)
        others, images = dict(given), {}
        for name in (IMAGES, *tower_of(self.config).given):
            value = others.pop(name, None)
            if value is not None:
                images[name] = value
        if IMAGES in images:
            others |= read_images(self.encoder, self.config, tokens, mask, images)
        return others

    def _image_inputs(
        self, given: Mapping[str, Any], inputs: Mapping[str, Tensor], mask: Tensor, cache: DecoderCache
    ) -> dict[str, Any]:
        """Return the image inputs for the next tokens: `inputs` and `mask` are the decoder's inputs for them."""
        filled, tokens = cache.length, inputs["input_ids"]
        if filled and given.get(IMAGES) is not None:
            raise MXError(f"the cache holds {filled} tokens: give images with the first tokens, or to generate")
        read = self._with_images_read(tokens, mask[:, : tokens.shape[1]], given)
        if self._images is None:
            return {}
        if not filled and read.get(ROWS) is None:
            check_number(tokens == self.config.image_token_id, 0)
        return inputs_of_next_tokens(self._images, read, inputs["position_ids"], mask, cache)

    def _cache_for(self, tokens: Tensor, cache: Any) -> DecoderCache:
        """Return the cache to write to: a cache of this model, or a new one that grows in place of an empty one."""
        check_tokens(tokens)
        if isinstance(cache, DecoderCache):
            if cache.grows and cache.length + tokens.shape[1] > cache.slots:
                cache.grow(room_for(cache.length + tokens.shape[1]))
            return cache
        if cache is not None and cache.get_seq_length():
            raise MXError(f"past_key_values is a filled {type(cache).__name__}: give what new_cache or a call gave")
        cache = self.new_cache(tokens.shape[0], tokens.shape[-1])
        cache.grows = True
        return cache

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: object, batch_size: int, max_cache_length: int
    ) -> None:
        check_length(self.config, max_cache_length)
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, DecoderCache):
            cache._is_user_defined = True  # as transformers marks it
            grows = max_cache_length > cache.slots
            if self._step is not None and (grows or self._step.cache is not cache):
                self._step = None  # frees the tensors of its cache
            if grows:
                cache.grow(room_for(max_cache_length))
        elif generation_config.use_cache:
            sequences = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            if self._step is not None and not self._step.frees_cache_for(sequences, room_for(max_cache_length)):
                self._step = None  # frees its cache before there is another
            model_kwargs[CACHE] = (
                self.new_cache(sequences, max_cache_length) if self._step is None else self._step.take_cache()
            )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate as transformers' loop does, by one `Step` a token; by that loop where a step does not cover it."""
        stopping = Stopping(stopping_criteria, input_ids)
        processors, longest = processors_of(logits_processor), stopping.longest
        if (
            processors is None
            or longest is None
            or synced_gpus
            or not self._covers(generation_config, model_kwargs, input_ids.shape[1], longest)
        ):
            others = logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
            return super()._sample(input_ids, *others, **model_kwargs)
        outputs = self._prefill(input_ids, generation_config, model_kwargs)
        model_kwargs = self._update_model_kwargs_for_generation(outputs, model_kwargs)
        cache: DecoderCache = model_kwargs[CACHE]
        with_next = torch.cat([input_ids, input_ids[:, -1:]], 1).long()  # any token
        given = self.prepare_inputs_for_generation(with_next, next_sequence_length=1, **model_kwargs)
        tokens = given.pop("input_ids")
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        inputs, mask = self._inputs_of(tokens, mask, positions, cache, given)
        pad = int(generation_config._pad_token_tensor) if stopping.pads else None
        returns_more = bool(generation_config.return_dict_in_generate)
        records = returns_more and bool(generation_config.output_scores or generation_config.output_logits)
        choice = Choice(processors, generation_config.do_sample, stopping.ends, pad, records)
        step, self._step = self._step, None
        with torch.cuda.device_of(outputs.logits):  # streams, events and graphs belong to the current GPU
            if step is None or not step.fits(self.runner, inputs, cache, choice):
                step = Step(self.runner, inputs, mask, cache, choice, outputs.logits.shape[-1])
            step.begin(inputs, mask, input_ids, choice.ignored)
            result = choose_tokens(step, outputs.logits, input_ids, longest, stopping, generation_config, streamer)
        step.cache_is_free = not (returns_more or getattr(cache, "_is_user_defined", False))
        if step.is_captured:
            self._step = step
        return result

    def _covers(self, config: Any, model_kwargs: Mapping[str, Any], length: int, longest: int) -> bool:
        """Return True where a step computes what transformers' loop does for prompts of a length."""
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        return (
            isinstance(cache, DecoderCache)
            and all(layer.is_croppable for layer in cache.layers)
            and (mask is None or mask.shape[1] == length)  # the prompts include the tokens in the cache
            and length + 2 <= longest <= cache.slots + 1
            and all(longest <= positions + 1 for positions in self.positions.values())  # no step checks them
            and not self.config.is_encoder_decoder
            and not (config.is_assistant or config.output_attentions or config.output_hidden_states)
            and not torch.distributed.is_initialized()
        )

    def _optimize_model_for_decode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _supports_logits_to_keep(self) -> bool:
        return True

    def can_generate(self) -> bool:
        """Return True, which pipelines of transformers ask for.

        Returns:
            True.
        """
        return True

    def is_remote_code(self) -> bool:
        """Return False: the code of the model is part of pt2mx.

        Returns:
            False.
        """
        return False
