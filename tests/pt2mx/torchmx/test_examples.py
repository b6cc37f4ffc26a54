"""The four programs of TorchMX's examples on small models: the same calls, with imports from `pt2mx.torchmx`."""

import threading

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified

import pt2mx
from pt2mx.extras import import_extra, without_log_warnings
from pt2mx.torchmx import dtypes
from pt2mx.torchmx.config import MXConfig, QAttentionConfig, QLinearConfig
from pt2mx.torchmx.mx_tensor import MXTensor
from pt2mx.torchmx.quant_api import mx_dynamic_activation_mx_weights, quantize_linear_, quantize_llm_

transformers = import_extra("transformers", "hf")
with without_log_warnings():
    from torchao.quantization import quantize_


def test_check_mxtensor_ops():
    torch.manual_seed(0)
    a = 10 * torch.rand(16, 32, dtype=torch.bfloat16)
    b = 10 * torch.rand(32, 64, dtype=torch.bfloat16)
    mx_a = MXTensor.to_mx(a, elem_dtype=dtypes.float8_e4m3, block_size=32)
    mx_b = MXTensor.to_mx(b, elem_dtype=dtypes.float8_e4m3, block_size=32)
    c = torch.matmul(mx_a, mx_b)
    assert isinstance(c, torch.Tensor) and not isinstance(c, MXTensor)
    assert torch.equal(c, pt2mx.fake_quantize_mx(a, "mxfp8") @ pt2mx.fake_quantize_mx(b, "mxfp8"))


class Graphs:
    """A backend that keeps the aten graphs that AOTAutograd makes, and runs them."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, gm, sample_inputs):
        def compile_graph(gm, sample_inputs):
            self.text += gm.print_readable(print_output=False)
            return gm.forward

        return aot_module_simplified(gm, sample_inputs, fw_compiler=compile_graph)


def by_module(model, weight, activation):
    configs = (MXConfig(elem_dtype_name=dtype.name, block_size=block) for dtype, block in (weight, activation))
    quantize_linear_(model, qconfig=QLinearConfig(*configs))


def by_tensor(model, weight, activation):
    quantize_(
        model,
        mx_dynamic_activation_mx_weights(
            weight_elem_dtype=weight[0],
            weight_block_size=weight[1],
            activation_elem_dtype=activation[0],
            activation_block_size=activation[1],
        ),
    )


@pytest.mark.compiled_except("by_module")
@pytest.mark.parametrize("quantize", [by_module, by_tensor])
def test_linear_model_atenir_graph(quantize, compiler):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU()).bfloat16()
    weights = [pt2mx.fake_quantize_mx(layer.weight, "mxfp6_e3m2") for layer in (model[0], model[2])]
    biases = [model[0].bias, model[2].bias]
    quantize(model, (dtypes.float6_e3m2, 32), (dtypes.STR_TO_SUPPORTED_ELEM_DTYPE["float8_e4m3"], 32))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    explanation = torch._dynamo.explain(model)(x)
    assert explanation.graph_count == 1 and explanation.graph_break_count == 0
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(model=model, backend=graphs, dynamic=True, fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):
            x = expected = torch.randn(8, 64, dtype=torch.bfloat16)
            for weight, bias in zip(weights, biases, strict=True):
                expected = nn.functional.linear(pt2mx.fake_quantize_mx(expected, "mxfp8"), weight, bias).relu()
            assert torch.equal(compiled(x), expected)
    assert "pt2mx.dequantize_mx.default" in graphs.text and "pt2mx.fake_quantize_mx.default" in graphs.text


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def linear_config(weights: str, activations: str, block_size: int = 32) -> QLinearConfig:
    return QLinearConfig(
        weights_config=MXConfig(elem_dtype_name=weights, block_size=32),
        activations_config=MXConfig(elem_dtype_name=activations, block_size=block_size),
    )


@pytest.mark.compiled
def test_llama_example_atenir_graph(compiler):
    torch.manual_seed(2)
    model = llama()
    attention = QAttentionConfig(
        projection_config=linear_config("float6_e3m2", "float8_e4m3", 16),
        query_config=MXConfig(elem_dtype_name="float8_e4m3"),
        key_config=MXConfig(elem_dtype_name="float4_e2m1"),
        value_config=MXConfig(elem_dtype_name="float4_e2m1"),
        attention_weights_config=MXConfig(elem_dtype_name="float6_e2m3"),
    )
    quantize_llm_(model=model, qattention_config=attention, qmlp_config=linear_config("float6_e2m3", "float8_e4m3"))
    inputs = {"input_ids": torch.randint(97, (1, 9)), "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    with torch.inference_mode():
        expected = model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)
    explanation = torch._dynamo.explain(model.forward)(**inputs)
    assert explanation.graph_break_count == 0
    torch._dynamo.reset()
    graphs = Graphs()
    model.forward = torch.compile(model=model.forward, backend=graphs, fullgraph=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected) and tokens.shape == (1, 11)
    assert "pt2mx.dequantize_mx.default" in graphs.text and "fp4_e2m1" in graphs.text


class Numbers:
    """A tokenizer as far as a streamer asks for one: tokens are numbers."""

    def decode(self, tokens, **options):
        return " ".join(str(int(token)) for token in tokens) + " "


def test_quantized_llama_chat():
    torch.manual_seed(95134)
    model = llama()
    int8 = MXConfig(elem_dtype_name="int8")
    linear = QLinearConfig(weights_config=int8, activations_config=int8)
    attention = QAttentionConfig(linear, int8, int8, int8, int8)
    quantize_llm_(model=model, qattention_config=attention, qmlp_config=linear)
    model = torch.compile(model=model, backend="inductor")  # generate() runs the module inside, as it does there
    inputs = {"input_ids": torch.randint(97, (1, 7)), "attention_mask": torch.ones(1, 7, dtype=torch.int64)}
    options = {**inputs, "max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    with torch.inference_mode():
        expected = model.generate(**options)[0, 7:].tolist()
        streamer = transformers.TextIteratorStreamer(Numbers(), skip_prompt=True)
        thread = threading.Thread(target=model.generate, kwargs={**options, "streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text.split() == [str(token) for token in expected]
