"""transformers' architectures, two layers each; heads of 12 and widths of 48 leave ragged blocks everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pt2mx.extras import import_extra
from tests.sweep.architecture import Architecture

_VOCABULARY = 99

#: settings by the names that most configurations give them; each takes what it knows
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_HEADLESS = {name: value for name, value in _TEXT.items() if name != "head_dim"}
_UNCOUNTED = {name: value for name, value in _TEXT.items() if name != "num_hidden_layers"}
_UNLIMITED = {name: value for name, value in _TEXT.items() if name != "max_position_embeddings"}
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
_SEQ2SEQ = {
    **_TEXT,
    "d_model": 48,
    "decoder_start_token_id": 1,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
}
_T5 = {**_TEXT, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_MOE = {
    **_TEXT,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}
_WAVE = {
    **_TEXT,
    "conv_dim": (16, 16, 16),
    "conv_stride": (4, 2, 2),
    "conv_kernel": (8, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3,
}
_MAMBA = {**_TEXT, "state_size": 8, "time_step_rank": 4}
_GPT2 = {**_TEXT, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, shape)


def _tokens(config: object) -> dict[str, Tensor]:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"input_ids": _ids(2, 10), "attention_mask": mask}


def _unmasked(config: object) -> dict[str, Tensor]:
    return {"input_ids": _ids(2, 8)}


def _seq2seq(config: object) -> dict[str, Tensor]:
    return {**_tokens(config), "decoder_input_ids": _ids(2, 6)}


def _masked_seq2seq(config: object) -> dict[str, Tensor]:
    return {**_seq2seq(config), "decoder_attention_mask": torch.ones(2, 6, dtype=torch.int64)}


def _image(config: object) -> dict[str, Tensor]:
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(2, 3, *size)}


def _video(config: object) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, config.num_frames, 3, config.image_size, config.image_size)}


def _wave(config: object) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 800)}


def _channel_wave(config: object) -> dict[str, Tensor]:
    return {"input_values": torch.randn(1, 1, 640)}


def _caption(config: object) -> dict[str, Tensor]:
    return {**_tokens(config), "pixel_values": torch.randn(2, 3, 32, 32)}


def _speech(config: object) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, config.num_mel_bins, 40), "decoder_input_ids": _ids(2, 6)}


#: (model class, kind, inputs, settings)
_TABLE = (
    ("BertForSequenceClassification", "encoder", _tokens, _TEXT),
    ("AlbertModel", "encoder", _tokens, {**_TEXT, "embedding_size": 40}),
    ("BigBirdModel", "encoder", _tokens, {**_TEXT, "attention_type": "original_full"}),
    ("CanineModel", "encoder", _tokens, {**_TEXT, "num_hash_buckets": 64, "downsampling_rate": 2}),
    ("ConvBertModel", "encoder", _tokens, {**_TEXT, "embedding_size": 48, "conv_kernel_size": 3}),
    ("DebertaModel", "encoder", _tokens, {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("DebertaV2Model", "encoder", _tokens, {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("DistilBertForMaskedLM", "encoder", _tokens, {**_TEXT, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80}),
    ("ElectraModel", "encoder", _tokens, {**_TEXT, "embedding_size": 40}),
    ("EsmModel", "encoder", _tokens, {**_TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    ("FNetModel", "encoder", _unmasked, _TEXT),
    (
        "FunnelModel",
        "encoder",
        _tokens,
        {
            **_UNCOUNTED,
            "d_model": 48,
            "n_head": 4,
            "d_head": 12,
            "d_inner": 80,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
    ),
    ("IBertModel", "encoder", _tokens, _TEXT),
    ("LayoutLMModel", "encoder", _tokens, _TEXT),
    (
        "MobileBertModel",
        "encoder",
        _tokens,
        {**_TEXT, "embedding_size": 40, "true_hidden_size": 40, "intra_bottleneck_size": 40},
    ),
    ("ModernBertForMaskedLM", "encoder", _tokens, _TEXT),
    ("MPNetModel", "encoder", _tokens, _TEXT),
    (
        "PerceiverForMaskedLM",
        "encoder",
        _tokens,
        {
            **_TEXT,
            "num_latents": 8,
            "d_latents": 48,
            "d_model": 40,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 32,
            "v_channels": 48,
        },
    ),
    ("RoFormerModel", "encoder", _tokens, {**_TEXT, "embedding_size": 40}),
    ("SqueezeBertModel", "encoder", _tokens, {**_TEXT, "embedding_size": 48}),
    ("XLMRobertaModel", "encoder", _tokens, _TEXT),
    (
        "XLNetModel",
        "encoder",
        _tokens,
        {**_UNLIMITED, "d_model": 48, "n_layer": 2, "n_head": 4, "d_inner": 80, "d_head": 12},
    ),
    ("BloomForCausalLM", "decoder", _tokens, {**_TEXT, "n_layer": 2, "n_head": 4}),
    ("CodeGenForCausalLM", "decoder", _tokens, {**_GPT2, "rotary_dim": 8}),
    ("CohereForCausalLM", "decoder", _tokens, _TEXT),
    ("CTRLModel", "decoder", _tokens, {**_TEXT, "n_embd": 48, "dff": 80, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("FalconForCausalLM", "decoder", _tokens, {**_HEADLESS, "alibi": True}),
    ("GPT2LMHeadModel", "decoder", _tokens, _GPT2),
    ("GPTBigCodeForCausalLM", "decoder", _tokens, _GPT2),
    ("GPTJForCausalLM", "decoder", _tokens, {**_GPT2, "rotary_dim": 8}),
    (
        "GPTNeoForCausalLM",
        "decoder",
        _tokens,
        {**_TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    ("GPTNeoXForCausalLM", "decoder", _tokens, _TEXT),
    ("Gemma2ForCausalLM", "decoder", _tokens, {**_TEXT, "sliding_window": 4}),
    ("Gemma3ForCausalLM", "decoder", _tokens, {**_TEXT, "sliding_window": 4}),
    ("Glm4ForCausalLM", "decoder", _tokens, _TEXT),
    ("LlamaForCausalLM", "decoder", _tokens, _TEXT),
    ("MistralForCausalLM", "decoder", _tokens, {**_TEXT, "sliding_window": 4}),
    ("MptForCausalLM", "decoder", _tokens, {**_TEXT, "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    ("Olmo2ForCausalLM", "decoder", _tokens, _TEXT),
    ("OPTForCausalLM", "decoder", _tokens, {**_TEXT, "ffn_dim": 80, "word_embed_proj_dim": 40}),
    ("PhiForCausalLM", "decoder", _tokens, _TEXT),
    ("Qwen2ForCausalLM", "decoder", _tokens, _TEXT),
    ("Qwen3ForCausalLM", "decoder", _tokens, _TEXT),
    (
        "StableLmForCausalLM",
        "decoder",
        _tokens,
        {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("Starcoder2ForCausalLM", "decoder", _tokens, _TEXT),
    (
        "DbrxForCausalLM",
        "mixture of experts",
        _tokens,
        {
            **_TEXT,
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48},
        },
    ),
    (
        "DeepseekV3ForCausalLM",
        "mixture of experts",
        _tokens,
        {
            **_MOE,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "qk_nope_head_dim": 12,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    ("GptOssForCausalLM", "mixture of experts", _tokens, _MOE),
    ("GraniteMoeForCausalLM", "mixture of experts", _tokens, _MOE),
    ("MixtralForCausalLM", "mixture of experts", _tokens, _MOE),
    ("OlmoeForCausalLM", "mixture of experts", _tokens, _MOE),
    ("Qwen2MoeForCausalLM", "mixture of experts", _tokens, _MOE),
    ("Qwen3MoeForCausalLM", "mixture of experts", _tokens, _MOE),
    (
        "BambaForCausalLM",
        "state space",
        _unmasked,
        {
            **_TEXT,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
    ),
    ("FalconMambaForCausalLM", "state space", _unmasked, _MAMBA),
    (
        "JambaForCausalLM",
        "state space",
        _unmasked,
        {
            **_MOE,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    ("Lfm2ForCausalLM", "state space", _unmasked, {**_TEXT, "layer_types": ["conv", "full_attention"]}),
    ("MambaForCausalLM", "state space", _unmasked, _MAMBA),
    (
        "Mamba2ForCausalLM",
        "state space",
        _unmasked,
        {**_TEXT, "state_size": 8, "num_heads": 8, "head_dim": 12, "n_groups": 2, "chunk_size": 4},
    ),
    (
        "RecurrentGemmaForCausalLM",
        "state space",
        _tokens,
        {**_TEXT, "lru_width": 48, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
    ),
    ("RwkvForCausalLM", "state space", _unmasked, {**_TEXT, "attention_hidden_size": 48, "context_length": 16}),
    (
        "Zamba2ForCausalLM",
        "state space",
        _unmasked,
        {
            **_TEXT,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 12,
            "chunk_size": 4,
            "layers_block_type": ["mamba", "hybrid"],
            "use_mem_eff_path": False,
        },
    ),
    ("BartForConditionalGeneration", "encoder-decoder", _seq2seq, _SEQ2SEQ),
    ("BlenderbotModel", "encoder-decoder", _seq2seq, _SEQ2SEQ),
    (
        "FSMTModel",
        "encoder-decoder",
        _masked_seq2seq,
        {**_SEQ2SEQ, "langs": ["a", "b"], "src_vocab_size": _VOCABULARY, "tgt_vocab_size": _VOCABULARY},
    ),
    ("LongT5Model", "encoder-decoder", _seq2seq, {**_T5, "local_radius": 3}),
    ("M2M100Model", "encoder-decoder", _seq2seq, _SEQ2SEQ),
    ("MarianModel", "encoder-decoder", _seq2seq, _SEQ2SEQ),
    ("MT5Model", "encoder-decoder", _seq2seq, _T5),
    ("PegasusModel", "encoder-decoder", _seq2seq, _SEQ2SEQ),
    (
        "ProphetNetModel",
        "encoder-decoder",
        _seq2seq,
        {
            **_UNCOUNTED,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 80,
            "decoder_ffn_dim": 80,
        },
    ),
    ("T5ForConditionalGeneration", "encoder-decoder", _seq2seq, _T5),
    ("BeitForImageClassification", "vision", _image, {**_VISION, "use_relative_position_bias": True}),
    ("BitModel", "vision", _image, {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4}),
    (
        "ConvNextModel",
        "vision",
        _image,
        {"image_size": 32, "hidden_sizes": [16, 48], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 1.0},
    ),
    (
        "ConvNextV2Model",
        "vision",
        _image,
        {"image_size": 32, "hidden_sizes": [16, 48], "depths": [1, 1], "num_stages": 2},
    ),
    ("CvtModel", "vision", _image, {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}),
    (
        "DPTForDepthEstimation",
        "vision",
        _image,
        {
            **_VISION,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
    ),
    ("Dinov2Model", "vision", _image, _VISION),
    (
        "EfficientNetModel",
        "vision",
        _image,
        {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    ),
    (
        "FocalNetModel",
        "vision",
        _image,
        {"image_size": 32, "embed_dim": 24, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    ),
    (
        "HieraModel",
        "vision",
        _image,
        {"image_size": [64, 64], "embed_dim": 24, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "num_query_pool": 2},
    ),
    (
        "LevitModel",
        "vision",
        _image,
        {
            "image_size": 64,
            "hidden_sizes": [32, 48, 64],
            "num_attention_heads": [2, 3, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    ("MobileNetV2Model", "vision", _image, {"image_size": 64}),
    (
        "MobileViTModel",
        "vision",
        _image,
        {"image_size": 64, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64]},
    ),
    (
        "MobileViTV2Model",
        "vision",
        _image,
        {"image_size": 64, "base_attn_unit_dims": [16, 24, 32], "n_attn_blocks": [1, 1, 1], "width_multiplier": 0.25},
    ),
    (
        "PoolFormerModel",
        "vision",
        _image,
        {"image_size": 64, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "layer_scale_init_value": 1.0},
    ),
    (
        "PvtV2Model",
        "vision",
        _image,
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 40, 48],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 4],
        },
    ),
    (
        "RegNetModel",
        "vision",
        _image,
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    ),
    (
        "SegformerForSemanticSegmentation",
        "vision",
        _image,
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 40, 48],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 4],
            "decoder_hidden_size": 40,
        },
    ),
    (
        "SwinModel",
        "vision",
        _image,
        {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    (
        "Swinv2Model",
        "vision",
        _image,
        {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    ("TimesformerModel", "vision", _video, {**_VISION, "num_frames": 2}),
    ("VideoMAEModel", "vision", _video, {**_VISION, "num_frames": 4}),
    ("ViTForImageClassification", "vision", _image, _VISION),
    ("VivitModel", "vision", _video, {**_VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]}),
    ("YolosModel", "vision", _image, {**_VISION, "image_size": [32, 32], "num_detection_tokens": 4}),
    (
        "ASTModel",
        "audio",
        lambda config: {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)},
        {**_VISION, "num_mel_bins": 32, "max_length": 40},
    ),
    (
        "DacModel",
        "audio",
        _channel_wave,
        {
            "encoder_hidden_size": 8,
            "decoder_hidden_size": 64,
            "downsampling_ratios": [2, 4],
            "upsampling_ratios": [4, 2],
            "n_codebooks": 2,
            "codebook_size": 32,
            "codebook_dim": 8,
        },
    ),
    (
        "EncodecModel",
        "audio",
        _channel_wave,
        {
            "num_filters": 8,
            "hidden_size": 48,
            "codebook_dim": 48,
            "upsampling_ratios": [4, 2],
            "codebook_size": 32,
            "target_bandwidths": [30.0],
        },
    ),
    ("HubertModel", "audio", _wave, _WAVE),
    ("SEWModel", "audio", _wave, {**_WAVE, "squeeze_factor": 2}),
    ("UniSpeechModel", "audio", _wave, _WAVE),
    ("Wav2Vec2ForCTC", "audio", _wave, _WAVE),
    ("Wav2Vec2ConformerModel", "audio", _wave, _WAVE),
    ("WavLMModel", "audio", _wave, _WAVE),
    (
        "WhisperForConditionalGeneration",
        "audio",
        _speech,
        {**_SEQ2SEQ, "max_source_positions": 20, "max_target_positions": 16, "num_mel_bins": 20},
    ),
    ("CLIPModel", "multimodal", _caption, {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 40}),
    (
        "SiglipModel",
        "multimodal",
        _caption,
        {"text_config": {**_TEXT, "projection_size": 48}, "vision_config": _VISION},
    ),
    (
        "BlipForImageTextRetrieval",
        "multimodal",
        _caption,
        {
            "text_config": {**_TEXT, "encoder_hidden_size": 48},
            "vision_config": _VISION,
            "projection_dim": 40,
            "image_text_hidden_size": 40,
        },
    ),
    (
        "PatchTSTForPrediction",
        "time series",
        lambda config: {"past_values": torch.randn(2, 32, 3)},
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 48,
            "num_attention_heads": 4,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "prediction_length": 4,
        },
    ),
    (
        "PatchTSMixerModel",
        "time series",
        lambda config: {"past_values": torch.randn(2, 32, 3)},
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 48,
            "num_layers": 2,
        },
    ),
)


def _architecture(name: str, kind: str, inputs, settings: dict) -> Architecture:
    def construct() -> tuple[nn.Module, dict[str, Tensor]]:
        transformers = import_extra("transformers", "hf")
        model = getattr(transformers, name)
        config = model.config_class(**settings)
        return model(config), inputs(config)

    return Architecture(name, kind, construct)


ARCHITECTURES = tuple(_architecture(*row) for row in _TABLE)
