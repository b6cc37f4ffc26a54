"""Convert models of torchao's quantizers, alone and together with ours: our `convert_pt2e` matches torchao's bit for
bit, and folds their weights."""

import copy
import warnings

import pytest
import torch
import torch._inductor.config
from torch import nn

from pt2mx import (
    MXQuantizer,
    convert_pt2e,
    get_default_mx_quantization_config,
    lower_to_inductor,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec, Quantizer
from tests.flow import exported, train
from tests.graph import quantized_at_each_call
from tests.models import OF_EACH_KIND

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def _inductor():
    """Importing torchao's X86 quantizer sets a pass of Inductor's for all models."""
    before = torch._inductor.config.pre_grad_custom_pass
    yield
    torch._inductor.config.pre_grad_custom_pass = before


def x86(**options):
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(**options))


def arm(**options):
    from torchao.quantization.pt2e.quantizer import arm_inductor_quantizer as arm

    return arm.ArmInductorQuantizer().set_global(arm.get_default_arm_inductor_quantization_config(**options))


def xnnpack(**options):
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "XNNPACKQuantizer is deprecated")  # in favour of ExecuTorch's
        return xnnpack.XNNPACKQuantizer().set_global(config)


def embedding():
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

    return EmbeddingQuantizer()


def composed(*quantizers):
    from torchao.quantization.pt2e.quantizer.composable_quantizer import ComposableQuantizer

    return ComposableQuantizer(list(quantizers))


QUANTIZERS = {
    "x86": x86,
    "x86, dynamic": lambda: x86(is_dynamic=True),
    "x86, trained": lambda: x86(is_qat=True),
    "x86, trained, dynamic": lambda: x86(is_qat=True, is_dynamic=True),
    "arm, dynamic": lambda: arm(is_dynamic=True),
    "xnnpack": xnnpack,
    "xnnpack, dynamic": lambda: xnnpack(is_dynamic=True),
    "xnnpack, trained": lambda: xnnpack(is_qat=True),
    "embedding, xnnpack dynamic": lambda: composed(embedding(), xnnpack(is_dynamic=True)),
}


def mx(module):
    return MXQuantizer().set_module_name(module, get_default_mx_quantization_config("mxfp4", "mxfp8"))


@torch.no_grad()
def check(prepared, x):
    """Compare with torchao's convert, also for a copy of the prepared model."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as convert_of_torchao

    converted, of_a_copy = convert_pt2e(prepared), convert_pt2e(copy.deepcopy(prepared))
    unfolded = convert_pt2e(prepared, fold_quantize=False)
    want = convert_of_torchao(prepared)(x)
    assert torch.equal(converted(x), want) and torch.equal(of_a_copy(x), want) and torch.equal(unfolded(x), want)
    assert quantized_at_each_call(unfolded) and not quantized_at_each_call(converted)
    assert torch.equal(exported(converted, x)(x), want)
    return converted


@pytest.mark.compiled_except(
    "x86-linear-True",
    "x86, trained-convolution-True",
    "x86, dynamic-gated-True",
    "arm, dynamic-linear-True",
    "xnnpack-gated-True",
    "embedding, xnnpack dynamic-convolution-True",
)
@pytest.mark.filterwarnings("ignore:torchao's convert_pt2e folds no batch norm")
@pytest.mark.parametrize(
    ("name", "with_ours"),
    [pytest.param("linear", False, marks=pytest.mark.slow), ("linear", True), ("convolution", True), ("gated", True)],
)
@pytest.mark.parametrize(
    "quantizer", [pytest.param(q, marks=pytest.mark.slow if q == "xnnpack, trained" else ()) for q in QUANTIZERS]
)
def test_quantizers_of_torchao(quantizer, name, with_ours):
    make, x, module = OF_EACH_KIND[name]
    model, other = make(), QUANTIZERS[quantizer]()
    prepare = prepare_qat_pt2e if "trained" in quantizer else prepare_pt2e
    prepared = prepare(exported(model, x), composed(mx(module), other) if with_ours else other)
    prepared(x)
    converted = check(prepared, x)
    got, want = converted(x).flatten(), model(x).flatten()
    assert nn.functional.cosine_similarity(got, want, 0) > 0.95
    if with_ours:
        assert f"{module}.weight_scale" in converted.state_dict()
        torch.testing.assert_close(lower_to_inductor(converted)(x).flatten(), got, atol=0.05, rtol=0.05)


class Normalized(nn.Module):
    """Layers followed by a batch norm. With two quantizers, `ours` is for MXQuantizer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)  # torchao forgets other eps
        self.depthwise, self.bn2 = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)
        self.ours, self.bn3 = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):  # (B, 4, H, W) -> (B, 3)
        x = torch.relu(self.bn1(self.conv(x)))
        x = self.bn3(self.ours(self.bn2(self.depthwise(x))))
        return self.fc(x.mean((2, 3)))


def trained(quantizer, prepare):
    torch.manual_seed(0)
    model, x = Normalized().train(), torch.randn(8, 4, 6, 6)
    prepared = prepare(exported(model, x), quantizer)
    train(prepared, x, steps=3, lr=0.05)
    return prepared, x


@pytest.mark.parametrize("with_ours", [False, True], ids=["alone", "with ours"])
@pytest.mark.parametrize("quantizer", ["x86, trained", pytest.param("xnnpack, trained", marks=pytest.mark.slow)])
def test_batch_norms_behind_layers_of_another_quantizer_are_folded(quantizer, with_ours):
    other = QUANTIZERS[quantizer]()
    prepared, x = trained(composed(mx("ours"), other) if with_ours else other, prepare_qat_pt2e)
    converted = convert_pt2e(prepared)
    assert not any(node.target is aten.batch_norm.default for node in converted.graph.nodes)
    assert quantized_at_each_call(convert_pt2e(prepared, fold_quantize=False))
    assert not quantized_at_each_call(converted)
    assert nn.functional.cosine_similarity(converted(x), prepared.eval()(x)).min() > 0.99


@pytest.mark.slow  # torchao exports its patterns once for each form of a layer
@pytest.mark.parametrize("quantizer", ["x86, trained", "xnnpack, trained"])
def test_training_with_another_quantizer_gives_what_torchaos_own_flow_gives(quantizer):
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e import quantize_pt2e as torchaos

    reference, x = trained(QUANTIZERS[quantizer](), torchaos.prepare_qat_pt2e)
    move_exported_model_to_eval(reference)
    prepared, _ = trained(QUANTIZERS[quantizer](), prepare_qat_pt2e)
    assert torch.equal(convert_pt2e(prepared)(x), torchaos.convert_pt2e(reference)(x))


class OperandQuantizer(Quantizer):
    """The specs of x, weight and bias of linear layers that no other quantizer has annotated."""

    def __init__(self, *specs):
        super().__init__()
        self.specs = specs

    def annotate(self, model):
        for node in model.graph.find_nodes(op="call_function", target=aten.linear.default):
            if Q_ANNOTATION_KEY not in node.meta:
                specs = [spec(node) if callable(spec) else spec for spec in map(self._spec, self.specs)]
                read = {n: spec for n, spec in zip(node.args, specs, strict=False) if spec is not None}
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(input_qspec_map=read, _annotated=True)
        return model

    def _spec(self, name):
        return SPECS[name]() if name else None

    def validate(self, model):
        pass


def int8():
    from torchao.quantization.pt2e import MinMaxObserver

    return QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_symmetric)


def derived():
    """32-bit integers in units of the product of the other two scales."""
    from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec

    def parameters(observers):
        x, weight = (observer.calculate_qparams()[0] for observer in observers)
        return x * weight, torch.zeros_like(x, dtype=torch.int32)

    return lambda node: DerivedQuantizationSpec(
        derived_from=[(node.args[0], node), (node.args[1], node)],
        derive_qparams_fn=parameters,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_tensor_symmetric,
    )


def affine(granularity, dynamic=False):
    from torchao.quantization import granularity as granularities
    from torchao.quantization.pt2e import MappingType
    from torchao.quantization.pt2e import _affine_quantization as observers

    kind = "Placeholder" if dynamic else "MinMax"
    observer = getattr(observers, f"AffineQuantized{kind}Observer").with_args(
        mapping_type=MappingType.SYMMETRIC,
        target_dtype=torch.int8,
        granularity=getattr(granularities, granularity[0])(*granularity[1:]),
        quant_min=-8,
        quant_max=7,
        eps=1e-6,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int32,
    )
    return QuantizationSpec(torch.int8, observer, -8, 7, is_dynamic=dynamic)


SPECS = {
    "int8": int8,
    "derived": derived,
    "tensor": lambda: affine(("PerTensor",)),
    "group": lambda: affine(("PerGroup", 16)),
    "token, dynamic": lambda: affine(("PerToken",), dynamic=True),
    "group, dynamic": lambda: affine(("PerGroup", 16), dynamic=True),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("with_ours", [False, True], ids=["alone", "with ours"])
@pytest.mark.parametrize(
    ("specs", "dtypes"),
    [
        (("int8", "int8", "int8"), {"weight": torch.int8, "bias": torch.int8}),
        (("int8", "int8", "derived"), {"weight": torch.int8, "bias": torch.int32}),
        ((None, None, "int8"), {"bias": torch.int8}),
        ((None, "group", None), {"weight": torch.int8}),
        (("tensor", "group", "tensor"), {"weight": torch.int8, "bias": torch.int8}),
        (("token, dynamic", "group", None), {"weight": torch.int8}),
        ((None, "group, dynamic", "int8"), {"weight": torch.int8, "bias": torch.int8}),
    ],
    ids=str,
)
def test_weights_and_biases_stay_as_another_quantizer_has_them(specs, dtypes, with_ours):
    """A quantized bias is no float constant. Weights in groups and computed scales are folded too."""
    x, other = torch.randn(4, 64), OperandQuantizer(*specs)
    prepared = prepare_pt2e(exported(OF_EACH_KIND["linear"][0](), x), composed(mx("0"), other) if with_ours else other)
    prepared(x)
    state = check(prepared, x).state_dict()
    for layer in ["2"] if with_ours else ["0", "2"]:
        for name in ("weight", "bias"):
            assert (f"{layer}.{name}" in state) == (name not in dtypes), sorted(state)
            assert name not in dtypes or state[f"{layer}.{name}_data"].dtype == dtypes[name]
        if "group, dynamic" in specs:
            assert state[f"{layer}.weight_scale"].shape == (len(state[f"{layer}.weight_data"]), 4)
    assert not with_ours or state["0.weight_scale"].dtype == torch.uint8
