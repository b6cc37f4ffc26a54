"""Quantize the modules of an eager model in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra, without_log_warnings
from pt2mx.torchmx import dtypes
from pt2mx.torchmx.config import MXConfig, QAttentionConfig, QLinearConfig
from pt2mx.torchmx.layers.mx_attention import ATTENTION, register_attention
from pt2mx.torchmx.layers.mx_linear import MXInferenceLinear

with without_log_warnings():
    from torchao.core.config import AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler


def quantize_linear_(model: nn.Module, qconfig: QLinearConfig) -> None:
    """Replace every `nn.Linear` in a model by an `MXInferenceLinear`, in place, as TorchMX's `quantize_linear_` does:
    all layers, or none if one fails.

    Other modules do not change, including subclasses of `nn.Linear`.

    Args:
        model: the model.
        qconfig: the formats of weights and inputs.

    Raises:
        MXError: for weights of another dtype than float32, float16 or bfloat16, naming the layer; for a model that is
            itself an `nn.Linear`, or holds none.

    Example:
        >>> import torch
        >>> from pt2mx import torchmx
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU())
        >>> config = torchmx.MXConfig("float8_e4m3", block_size=32)
        >>> torchmx.quantize_linear_(model, torchmx.QLinearConfig(config, config))
        >>> model[0]
        MXInferenceLinear(in_features=32, out_features=8, bias=True, weight=mxfp8_e4m3{32}, activation=mxfp8_e4m3{32})
    """
    _check_kind("model", model, nn.Module)
    _check_kind("qconfig", qconfig, QLinearConfig)
    _replace_linears(model, lambda name: qconfig)


def quantize_llm_(model: nn.Module, qattention_config: QAttentionConfig, qmlp_config: QLinearConfig) -> None:
    """Quantize a Llama or Qwen2 of transformers in place, as TorchMX's `quantize_llm_` does: the whole model, or
    nothing if a layer fails.

    The projections of attention have the formats of `qattention_config.projection_config`. All other `nn.Linear`s,
    including the head, have the formats of `qmlp_config`. If the attention config has formats for queries, keys, values
    and attention weights, `pt2mx.torchmx.layers.mx_attention` computes the attention; otherwise the model keeps its
    function. A head that was tied to the embedding gets its own weight. Save the `state_dict` of the model:
    `save_pretrained` does not support `MXTensor` weights.

    Args:
        model: the model.
        qattention_config: the formats of its attention layers.
        qmlp_config: the formats of all other linear layers.

    Raises:
        MXError: for other models, without transformers, and as `quantize_linear_` does.

    Example:
        >>> from pt2mx import torchmx
        >>> from pt2mx.extras import import_extra
        >>> transformers = import_extra("transformers", "hf")
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
        >>> fp4, fp8 = torchmx.MXConfig("float4_e2m1"), torchmx.MXConfig("float8_e4m3")
        >>> attention = torchmx.QAttentionConfig(torchmx.QLinearConfig(fp8, fp8))
        >>> torchmx.quantize_llm_(model, attention, torchmx.QLinearConfig(fp4, fp8))
        >>> model.lm_head.weight
        MXTensor(shape=(8, 32), elem_dtype=fp4_e2m1, block_size=32, axis=1, dtype=torch.float32, device='cpu')
    """
    _check_kind("model", model, nn.Module)
    _check_kind("qattention_config", qattention_config, QAttentionConfig)
    _check_kind("qmlp_config", qmlp_config, QLinearConfig)
    kinds = _attention_kinds()
    attention = {name: module for name, module in model.named_modules() if type(module) in kinds}
    if not attention:
        raise MXError(
            f"quantize_llm_: {type(model).__name__} is no Llama or Qwen2 of transformers: it has none of the modules "
            f"{', '.join(kind.__name__ for kind in kinds)}; quantize_linear_ takes any model, and leaves the attention "
            "product in high precision"
        )

    def config_of(name: str) -> QLinearConfig:
        inside = name.rpartition(".")[0] in attention
        return qattention_config.projection_config if inside else qmlp_config

    _replace_linears(model, config_of)
    for module in attention.values():
        module.qconfig = qattention_config
        module.config.tie_word_embeddings = False
        if qattention_config.is_qkv_quantization_enabled:
            register_attention()
            module.config._attn_implementation = ATTENTION


@dataclass(frozen=True)
class MXDynamicActivationMXWeightsConfig(AOBaseConfig):
    """Make each linear layer an `MXInferenceLinear` of that config; the layer stays the same object."""

    qconfig: QLinearConfig


@register_quantize_module_handler(MXDynamicActivationMXWeightsConfig)
def _quantize(linear: nn.Linear, config: MXDynamicActivationMXWeightsConfig) -> nn.Linear:
    if isinstance(linear, MXInferenceLinear) and linear.qconfig == config.qconfig:
        return linear  # several modules share it
    if type(linear) is not nn.Linear:
        raise MXError(
            f"a {type(linear).__name__} is quantized already, or has a forward of its own: leave it out with the "
            "filter_fn of quantize_"
        )
    quantized = MXInferenceLinear.from_float(linear, config.qconfig)
    # in place, as TorchMX does it: quantize_ cannot replace a model that is itself a linear layer
    linear.weight, linear.__class__ = quantized.weight, MXInferenceLinear
    linear.qconfig = quantized.qconfig  # type: ignore[assignment]  # a module's further attributes are not declared
    return linear


def mx_dynamic_activation_mx_weights(
    weight_elem_dtype: object = dtypes.float6_e3m2,
    weight_block_size: int = 32,
    activation_elem_dtype: object = dtypes.float8_e4m3,
    activation_block_size: int = 32,
) -> MXDynamicActivationMXWeightsConfig:
    """Return a config for torchao's `quantize_(model, ...)`, as TorchMX's function of this name does. It quantizes the
    weights of linear layers once, and their inputs at each call. Elements are as `pt2mx.parse` takes them.

    Raises:
        MXError: for other elements and block sizes; inside `quantize_`, as `quantize_linear_` does.
    """
    weight = MXConfig(weight_elem_dtype, weight_block_size)
    activation = MXConfig(activation_elem_dtype, activation_block_size)
    return MXDynamicActivationMXWeightsConfig(QLinearConfig(weight, activation))


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise MXError(f"{name} must be a {kind.__name__}, not {value!r}")


def _attention_kinds() -> tuple[type[nn.Module], ...]:
    import_extra("transformers", "hf")
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

    return LlamaAttention, Qwen2Attention


def _replace_linears(model: nn.Module, config_of: Callable[[str], QLinearConfig]) -> None:
    """Quantize all layers before the first is replaced. A layer that several modules share stays one layer."""
    if type(model) is nn.Linear:
        raise MXError("an nn.Linear cannot replace itself: use MXInferenceLinear.from_float, or put it in a module")
    linears = {name: m for name, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    if not linears:
        raise MXError(f"{type(model).__name__} has no nn.Linear to quantize, or they are quantized already")
    quantized: dict[nn.Linear, MXInferenceLinear] = {}
    for name, linear in linears.items():
        if linear not in quantized:
            try:
                quantized[linear] = MXInferenceLinear.from_float(linear, config_of(name))
            except MXError as error:
                raise MXError(f"{name}: {error}") from error
    for name, linear in linears.items():
        model.set_submodule(name, quantized[linear])
