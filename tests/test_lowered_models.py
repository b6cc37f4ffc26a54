"""Real architectures through `lower_to_inductor`: what is rewritten, how exact it stays, what Inductor makes of it."""

import functools
import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pt2mx
from pt2mx import MXQuantizer, MXSpec, lower_to_inductor, ops
from pt2mx.extras import import_extra
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq
from pt2mx.fx.passes.packed_operands import use_packed_embeddings
from pt2mx.kernels.cpu.linear import isa_for
from pt2mx.ops import linear
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.quantize_epilogue import conv2d_fake_quantize_mx, linear_fake_quantize_mx
from tests.compare import relative_error
from tests.flow import calibrated, convert, exported
from tests.graph import called, count
from tests.models import Logits, module_of

aten = torch.ops.aten
IDS = torch.tensor([[3, 0, 7, 19, 2, 2, 40], [1, 1, 2, 5, 90, 33, 8]])
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
EXPERTS = {"num_key_value_heads": 1, "num_experts_per_tok": 2}

#: architecture -> its class, its configuration, its dtype, matmuls with packed weights (no routers), embeddings
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1}, torch.float32, 9, 1),
    "llama tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}, torch.bfloat16, 9, 1),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2}, torch.float32, 9, 2),
    "mixtral": ("MixtralForCausalLM", {**SIZES, **EXPERTS, "num_local_experts": 4}, torch.bfloat16, 9, 1),
    "mixtral, float32": ("MixtralForCausalLM", {**SIZES, **EXPERTS, "num_local_experts": 4}, torch.float32, 9, 1),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {**SIZES, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32},
        torch.bfloat16,
        9,
        1,
    ),
}


class Errors(TorchDispatchMode):
    """Relative errors of every matmul with a packed weight, and of the plain matmul in its dtype, against a float64 one
    of the same operands. bfloat16 rounds a weight with a tensor scale; the kernels need not."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        y = operator(*args, **kwargs or {})
        if operator is linear_fake_quantize_mx:
            self.__torch_dispatch__(linear.linear_mx, types, (*args[:6], 0, args[6]))
        if operator is conv2d_fake_quantize_mx:
            self.__torch_dispatch__(conv2d_mx, types, args[:10])
        if operator in (linear.linear_mx, linear.grouped_linear_mx):
            x, data, scale, third, name, block_size, *_ = args
            x, scales = x.to(y.dtype), scales_of(operator, args)
            weight = ops.dequantize_mx(data, scale, name, block_size, torch.float32, -1, x.shape[-1], *scales)
            if operator is linear.linear_mx:
                plain = F.linear(x, weight.to(x.dtype), third)
                exact = F.linear(x.double(), weight.double(), third if third is None else third.double())
            else:
                plain = F.grouped_mm(x, weight.to(x.dtype).mT, offs=third)
                ends = [0, *third.tolist()]
                exact = torch.cat(
                    [x[a:b].double() @ w.double().T for a, b, w in zip(ends, ends[1:], weight, strict=False)]
                )
            self.found.append([relative_error(z, exact) for z in (y, plain)])
        if operator is conv2d_mx:
            x, data, scale, bias, name, block_size, *moves = args[:9]
            x = x.to(y.dtype).permute(0, 3, 1, 2)
            weight = ops.dequantize_mx(data, scale, name, block_size, x.dtype, -1, x.shape[1]).permute(0, 3, 1, 2)
            exact = F.conv2d(x.double(), weight.double(), bias if bias is None else bias.double(), *moves)
            both = (y.permute(0, 3, 1, 2), F.conv2d(x, weight, bias, *moves))
            self.found.append([relative_error(z, exact) for z in both])
        return y


def scales_of(operator, args):
    """The trailing arguments of a matmul with another scale than E8M0."""
    named = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False))
    return [named.get(name) for name in ("scale_format", "block_rows", "tensor_scale")]


def assert_as_exact(lowered, args, matmuls):
    with Errors() as errors, torch.no_grad():
        lowered(*args)
    assert len(errors.found) == matmuls
    for packed, plain in errors.found:
        assert packed <= 1.5 * plain + 1e-7


def assert_same_bits(converted, args):
    """Of the passes that change no sum."""
    model = copy_sharing_tensors(converted)
    for change in (cse_quantize, fuse_qdq, use_packed_embeddings):
        change(model)
    assert not count(model, ops.quantize_mx)
    with torch.no_grad():
        assert torch.equal(model(*args), converted(*args))


def bytes_of(model):
    """Return the bytes of all tensors of a model, and those of tensor scales."""
    tensors = {t.data_ptr(): (t.nbytes, name.endswith("tensor_scale")) for name, t in model.state_dict().items()}
    return sum(size for size, _ in tensors.values()), sum(size for size, is_scale in tensors.values() if is_scale)


@functools.cache
def exported_architecture(name):
    """Return the graph of a model, once for all recipes."""
    kind, sizes, dtype, *_ = ARCHITECTURES[name]
    kind = getattr(import_extra("transformers", "hf"), kind)
    model = kind(kind.config_class(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    return exported(Logits(model.eval().to(dtype)), IDS)


@pytest.mark.slow_cases(
    "mxfp4_weight_only-llama tied",
    "mxfp4_weight_only-gpt2",
    "mxfp4_weight_only-mixtral",
    "mxfp4_weight_only-qwen3 moe",
    "nvfp4_weight_only-llama tied",
    "nvfp4_weight_only-gpt2",
    "nvfp4_weight_only-mixtral, float32",
    "nvfp4_weight_only-qwen3 moe",
    "mxfp8-mixtral",
)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only", "nvfp4_weight_only"])
@pytest.mark.compiled_cases(
    "mxfp8-mixtral, float32", "mxfp8-qwen3 moe", "mxfp8-llama tied", "mxfp8-gpt2", "nvfp4_weight_only-mixtral"
)
def test_language_models(name, recipe):
    *_, sizes, _, matmuls, embeddings = ARCHITECTURES[name]
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported_architecture(name), MXQuantizer.from_recipe(recipe)))
    lowered = lower_to_inductor(converted)
    counts = Counter(called(lowered))
    assert counts[linear.linear_mx] + counts[linear.grouped_linear_mx] == matmuls
    assert (counts[linear.grouped_linear_mx] > 0) == ("experts" in str(sizes))
    assert counts[ops.dequantize_mx] == embeddings and counts[aten.embedding.default] == 2 * embeddings
    assert not any(counts[target] for target in (ops.quantize_mx, aten.addmm.default))
    assert counts[aten.linear.default] == 2 * ("experts" in str(sizes))  # routers
    assert_same_bits(converted, (IDS,))
    assert_as_exact(lowered, (IDS,), matmuls)
    (total, tensor_scales), (before, separate) = map(bytes_of, (lowered, converted))
    assert total - tensor_scales == before - separate and tensor_scales <= separate  # merged layers have one


@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "nvfp4"])
def test_layers_merge_that_share_a_tensor_scale(recipe):
    """As many matmuls as with E8M0 scales: queries, keys and values in one, gate and up projection in one."""
    torch.manual_seed(0)
    model, args = of_architecture("llama")
    prepared = calibrated(exported(model, *args), MXQuantizer.from_recipe(recipe), *args)
    with torch.no_grad():
        converted = pt2mx.convert_pt2e(prepared)
        want, lowered = converted(*args), lower_to_inductor(converted)
        assert Counter(called(lowered))[linear.linear_mx] == ARCHITECTURES["llama"][3]
        assert relative_error(lowered(*args), want) < 1e-6


#: weight, activation, tensor scales of activations
SCALE_FORMATS = (
    ("nvfp4", "nvfp4", "static"),
    ("nvfp4(four_six)", "nvfp4", "dynamic"),
    ("nvfp4(mse)", None, "static"),
    ("fp8_e4m3{32x32}(f32)", "fp8_e4m3{32}(f32)", "static"),
    ("int4{32}(bf16)", "int8{32}(bf16)", "static"),
)


#: the models and formats of weights that the quick tests take
QUICK = (("mixtral, float32", "nvfp4"), ("resnet", "fp8_e4m3{32x32}(f32)"))


def small_res_net(self, x):
    """Convolutions with a batch norm, a residual, one channel a group, and a linear layer."""
    x = F.relu(self.b(F.relu(self.norm(self.a(x)))))
    return self.head(F.relu(self.d(x + self.c(x))).mean((2, 3)))


def of_architecture(name):
    kind, sizes, *_ = ARCHITECTURES[name]
    kind = getattr(import_extra("transformers", "hf"), kind)
    return Logits(kind(kind.config_class(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).eval()), (IDS,)


@pytest.mark.parametrize(
    ("name", "weight", "activation", "tensor_scale"),
    [
        pytest.param(name, *formats, marks=() if (name, formats[0]) in QUICK else pytest.mark.slow)
        for name in ("llama", "mixtral, float32", "resnet")
        for formats in SCALE_FORMATS
    ],
)
@pytest.mark.compiled_cases("mixtral, float32-nvfp4-nvfp4-static")
def test_scales_other_than_e8m0(name, weight, activation, tensor_scale):
    """Passes that know E8M0 scales alone leave these models unchanged; the others keep their values."""
    torch.manual_seed(0)
    net = module_of(
        small_res_net,
        a=nn.Conv2d(3, 32, 3, padding=1),
        norm=nn.BatchNorm2d(32),
        b=nn.Conv2d(32, 64, 3, stride=2),
        c=nn.Conv2d(64, 64, 1),
        d=nn.Conv2d(64, 64, 3, groups=64),
        head=nn.Linear(64, 10),
    )
    model, args = of_architecture(name) if name != "resnet" else (net.eval(), (torch.randn(2, 3, 12, 12),))
    quantizer = MXQuantizer().set_global(
        pt2mx.MXQuantizationConfig(weight=weight, activation=activation, tensor_scale=tensor_scale)
    )
    prepared = calibrated(exported(model, *args), quantizer, *args)
    pt2mx.disable_observer(prepared)
    pt2mx.enable_fake_quant(prepared)
    with torch.no_grad():
        want, converted = prepared(*args), pt2mx.convert_pt2e(prepared)
        assert torch.equal(converted(*args), want)
        assert relative_error(lower_to_inductor(converted, unpack=True)(*args), want) < 1e-6
        lowered = lower_to_inductor(converted)
        # a value of an activation may change over a rounding boundary
        assert relative_error(lowered(*args), want) < (1e-6 if activation is None else 0.05)
    assert_same_bits(converted, args)
    counts = Counter(called(lowered))
    assert not counts[ops.quantize_mx] and bool(counts[ops.fake_quantize_mx]) == (activation is not None)
    assert_as_exact(lowered, args, counts[linear.linear_mx] + counts[linear.grouped_linear_mx])


@pytest.mark.slow_except("resnet18-mxfp8-1-20")
@pytest.mark.parametrize(
    ("name", "recipe", "matmuls", "convolutions"),
    [
        ("minilm", "mxfp8", 24, 0),
        ("resnet18", "mxfp8", 1, 20),
        ("resnet18", "mxfp4_weight_only", 1, 20),
        pytest.param("minilm", "mxfp4_weight_only", 24, 0, marks=pytest.mark.slow),  # as of the language models
    ],
)
def test_real_models(name, recipe, matmuls, convolutions, request):
    """With bfloat16 instructions, convolutions of quantized activations become matmuls."""
    model = request.getfixturevalue(name)
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model.program.module(), MXQuantizer.from_recipe(recipe)))
    lowered = lower_to_inductor(converted)
    assert_same_bits(converted, model.args)
    convolved = recipe == "mxfp8" and bool(isa_for(MXSpec("fp8_e4m3", 32), 64))
    assert_as_exact(lowered, model.args, matmuls + convolutions * convolved)
    again = torch.export.export(lowered, model.args, dynamic_shapes=model.shapes).module()
    with torch.no_grad():
        assert torch.equal(again(*model.inputs), lowered(*model.inputs))


def kernels(code):
    """What each call of a generated kernel fuses, by the names that Inductor gives it."""
    return re.findall(r"^\s+cpp_fused_(\w+?)_\d+\(", code, re.MULTILINE)


def quantizes_alone(kernel):
    return "fake_quantize_mx" in kernel and not re.sub("fake_quantize_mx|linear_mx|transpose|view|clone|_", "", kernel)


@pytest.mark.compiled
def test_no_kernel_of_a_bert_layer_only_quantizes(compiler):
    """Quantization sits in the kernel of the neighbour that gives the tensor: layer norm, the bias of a projection,
    softmax, GELU. But what attention gives comes from a call, into which nothing can be fused, and which has no bias:
    there the kernel that puts the heads side by side quantizes them too."""
    bert = import_extra("transformers", "hf").models.bert.modeling_bert
    config = bert.BertConfig(hidden_size=64, intermediate_size=128, num_attention_heads=2, attn_implementation="eager")
    model = nn.Sequential(nn.LayerNorm(64), bert.BertLayer(config)).eval()
    x = torch.randn(2, 7, 64)
    with torch.no_grad():
        converted = convert(model, (x,))
        got, (code,) = run_and_get_code(torch.compile(lower_to_inductor(converted)), x)
    torch.testing.assert_close(got, converted(x), rtol=0.1, atol=0.1)
    called = kernels(code)
    quantizing = [kernel for kernel in called if "fake_quantize_mx" in kernel]
    assert (len(called), len(quantizing)) == (7, 6)
    alone = [kernel for kernel in quantizing if quantizes_alone(kernel)]
    assert alone == ["clone_fake_quantize_mx_linear_mx_transpose_view"]
    for neighbour in ("native_layer_norm", "_softmax", "gelu", "add"):
        assert any(neighbour in kernel for kernel in quantizing)
    assert not re.findall(r"torch\.ops\.pt2mx\.(\w+)", code)  # matmuls are prepared calls
