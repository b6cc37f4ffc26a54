"""The flow on an NVIDIA GPU."""

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pt2mx
from pt2mx import FORMATS, MXQuantizer, get_default_mx_quantization_config
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.packages.compile import compile_program
from pt2mx.pt2e.packages.package import load_package
from tests.compare import relative_error
from tests.flow import assert_converts_to_the_bit, exported, train
from tests.models import IMAGES, NormalizedConv, module_of
from tests.subgraph_models import QUANTIZER, Autocast, Checkpoint, Cond, NoGrad, X
from tests.training_models import NORMALIZED_LAYERS, WITH_MODES, layer_and_norm

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*FORMATS, "nvfp4", "nvfp4(four_six)", "fp8_e4m3{row}(f32)"])
def test_converted_is_prepared_to_the_bit(name, dtype, quantize):
    model, inputs = NormalizedConv().eval().to("cuda", dtype), (IMAGES[0].to("cuda", dtype),)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    want, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), want)
    assert all(t.device.type == "cuda" for t in converted.state_dict().values())


def test_a_bert_layer_compiles_and_agrees(quantize, tmp_path):
    transformers = import_extra("transformers", "hf")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval().cuda()
    model.register_forward_hook(lambda module, inputs, output: output.to_tuple())
    inputs = (torch.randint(99, (2, 33), device="cuda"),)
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)},)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    want, _, converted = quantize(program, MXQuantizer.from_recipe("mxfp4_weight_only"), inputs)
    assert torch.equal(converted(*inputs)[0], want[0])
    torch.export.save(torch.export.export(converted, inputs, dynamic_shapes=shapes), tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.equal(loaded(*inputs)[0], want[0])
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.allclose(torch.compile(converted)(*inputs)[0], want[0], rtol=1e-3, atol=1e-3)
    assert pt2mx.quantization_report(converted).effective_bits < 6


@pytest.mark.parametrize("unpack", [False, True])
def test_lowered_to_a_device_without_an_index(unpack, quantize):
    """torch.export asserts the devices of casts, index and all."""
    x = torch.randn(3, 64, device="cuda")
    casts = module_of(lambda self, x: self.fc(x.to(self.fc.weight.dtype)).to(torch.float32), fc=torch.nn.Linear(64, 64))
    program = torch.export.export(casts.eval().to("cuda", torch.bfloat16), (x,))
    want, _, converted = quantize(program, MXQuantizer.from_recipe("mxfp8"), (x,))
    torch._dynamo.reset()
    with torch.no_grad():
        lowered = torch.compile(pt2mx.lower_to_inductor(converted, "cuda", unpack=unpack), fullgraph=True)
        # Inductor quantizes x before rounding it to bfloat16
        assert relative_error(lowered(x), want) < 0.05


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("rows", [1, 100])
def test_lowered_to_a_device_that_is_not_the_current_one(rows, quantize):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).eval().bfloat16()
    x = torch.randn(rows, 256, dtype=torch.bfloat16)
    _, _, converted = quantize(torch.export.export(model, (x,)), MXQuantizer.from_recipe("mxfp4_weight_only"), (x,))
    with torch.no_grad():
        here, there = (pt2mx.lower_to_inductor(converted, device) for device in ("cuda:0", "cuda:1"))
        want = here(x.to("cuda:0"))
        for lowered in (there, torch.compile(there, fullgraph=True)):
            got = lowered(x.to("cuda:1"))
            assert got.device == torch.device("cuda:1")
            assert relative_error(got, want) < 0.01


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
@pytest.mark.parametrize("options", [[], ["--portable"]])
def test_packages(recipe, options, quantize, tmp_path, capsys):
    """Quantized on the CPU, compiled for the GPU."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 48)).eval().bfloat16()
    x, shapes = torch.randn(6, 64, dtype=torch.bfloat16), ({0: torch.export.Dim("batch", max=2048)},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    _, _, converted = quantize(program, MXQuantizer.from_recipe(recipe), (x,))
    torch.export.save(torch.export.export(converted, (x,), dynamic_shapes=shapes), tmp_path / "net.pt2")
    path = str(tmp_path / "net.aoti.pt2")
    assert main(["compile", str(tmp_path / "net.pt2"), "--output", path, "--device", "cuda", *options]) == 0
    assert main(["run", path]) == 0
    assert "ms a call on cuda" in capsys.readouterr().out
    package = load_package(path)
    for batch in (1, 6, 700):
        x = torch.randn(batch, 64, dtype=torch.bfloat16)
        got, want = package(x.cuda()), converted(x)
        assert got.is_cuda and relative_error(got, want) < 0.02


@pytest.mark.parametrize("model", [NoGrad, Autocast, Cond, Checkpoint])
def test_graphs_inside_graphs(model, quantize):
    x = X.cuda()
    want, _, converted = quantize(torch.export.export(model().eval().cuda(), (x,)), QUANTIZER, (x,))
    with torch.no_grad():
        assert torch.equal(converted(x), want)
    assert all(t.device.type == "cuda" for t in converted.state_dict().values())


@pytest.mark.parametrize("name", NORMALIZED_LAYERS)
def test_batch_norms_fold_without_difference(name):
    model, inputs = layer_and_norm(name)
    inputs = tuple(x.cuda() for x in inputs)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp6{8}", "mxfp8{8}"))
    prepared = pt2mx.prepare_qat_pt2e(exported(model.cuda().train(), *inputs), quantizer)
    train(prepared, *inputs, steps=3)
    assert_converts_to_the_bit(prepared, *inputs)


@pytest.mark.parametrize("name", NORMALIZED_LAYERS)
def test_batch_norms_have_eagers_gradients_checkpointed_and_compiled(name, compiler):
    """Two steps. On a GPU backward passes run in a separate thread. In compiled code a weight may round differently;
    those of the first channel do: its scale is zero, and after a step the error of a sum that would be zero."""
    model, inputs = layer_and_norm(name)
    inputs = tuple(x.cuda() for x in inputs)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp6{8}", None))
    results = []
    for call in (
        lambda m: m(*inputs),
        lambda m: checkpoint(m, *inputs, use_reentrant=False),
        lambda m: torch.compile(m, fullgraph=True)(*inputs),
    ):
        prepared = pt2mx.prepare_qat_pt2e(exported(copy.deepcopy(model).cuda().train(), *inputs), quantizer)
        optimizer = torch.optim.SGD(prepared.parameters(), 1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            call(prepared).square().mean().backward()
            optimizer.step()
        gradients = torch.cat([p.grad.flatten() for p in prepared.parameters()])
        results.append((gradients, torch.stack([t for k, t in prepared.state_dict().items() if "running" in k])))
    (want, statistics), (checkpointed, counted), (compiled, compiled_statistics) = results
    assert relative_error(checkpointed, want) < 1e-6 and relative_error(counted, statistics) < 1e-6
    assert relative_error(compiled, want) < 0.02
    assert relative_error(compiled_statistics[:, 1:], statistics[:, 1:]) < 1e-3


@pytest.mark.parametrize("name", ["dropout", "batch_norm", "lstm", "gru"])
def test_modes(name):
    model, shape = WITH_MODES[name]
    model, x = copy.deepcopy(model).train().cuda(), torch.randn(shape, device="cuda")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes self.rnn", UserWarning)  # torch.export
        graph = exported(model, x)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxint8", "mxint8"))
    prepared = pt2mx.prepare_qat_pt2e(graph, quantizer)
    prepared(x).sum().backward()
    assert_converts_to_the_bit(prepared, x)


def test_formats_are_compared_on_the_device(quantize):
    observer = pt2mx.MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8"))
    config = pt2mx.MXQuantizationConfig(weight="mxfp8", activation="mxfp8", observer=observer)
    on_gpu = torch.export.export(NormalizedConv().eval().cuda(), (IMAGES[0].cuda(),))
    _, prepared, _ = quantize(on_gpu, MXQuantizer().set_global(config), (IMAGES[0].cuda(),))
    cpu = torch.export.export(NormalizedConv().eval(), IMAGES)
    _, prepared_on_cpu, _ = quantize(cpu, MXQuantizer().set_global(config), IMAGES)
    for got, want in zip(*(pt2mx.quantization_report(p).operators for p in (prepared, prepared_on_cpu)), strict=True):
        for a, b in zip(got.operands, want.operands, strict=True):
            assert a.candidates.keys() == b.candidates.keys() and len(a.candidates) == (2 if a.spec else 0)
            for name in a.candidates:
                assert a.candidates[name].sqnr == pytest.approx(b.candidates[name].sqnr, rel=1e-3)
    assert pt2mx.suggest_config(prepared, 9.0)


def test_training_compiles_and_agrees():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda().train()
    x, losses = torch.randn(16, 64, device="cuda"), []
    for compiled in (False, True):
        prepared = pt2mx.prepare_qat_pt2e(exported(copy.deepcopy(model), x), MXQuantizer.from_recipe("mxfp8"))
        step = torch.compile(prepared, fullgraph=True) if compiled else prepared
        losses.append(train(step, x, steps=10, target=1))
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and losses[0][-1] < losses[0][0]


@pytest.mark.xfail(
    torch.__version__ < "2.12", reason="AOTInductor passes dtypes to operators as other dtypes: pytorch/pytorch#169157"
)
def test_a_program_that_a_package_tries_with_an_index_out_of_range(quantize, tmp_path):
    """On a GPU an index out of range ends the process."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 64, device="cuda"), torch.ones(8, device="cuda")
    rows = {0: torch.export.Dim.DYNAMIC}
    # reads a mask at each id's position, past its end if the mask is shorter
    masked = module_of(
        lambda self, x, mask: self.linear(x) * mask[torch.arange(x.shape[0], device=x.device)].unsqueeze(1),
        linear=torch.nn.Linear(64, 64),
    )
    program = torch.export.export(masked.cuda(), inputs, dynamic_shapes=(rows, rows))
    _, _, converted = quantize(program, MXQuantizer.from_recipe("mxfp8"), inputs)
    program = torch.export.export(converted, inputs, dynamic_shapes=(rows, rows))
    path = str(tmp_path / "masked.aoti.pt2")
    compile_program(program, path, "cuda")
    package = load_package(path)
    shorter = inputs[0][:5], inputs[1][:6]
    assert torch.allclose(package(*shorter), converted(*shorter), atol=1e-5)
    with pytest.raises(MXError, match="mask"):
        package(inputs[0], inputs[1][:6])
