"""Traps of torchao's PT2E flow for operators and modules of others: one test for each. Its docstring describes the
issue. test_traps_outside.py has the missing numbers."""

import copy
import gc
import operator
import weakref

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXObserver, MXQuantizer, get_default_mx_quantization_config, ops
from pt2mx.extras import import_extra
from pt2mx.pt2e.observe.torchao_pt2e import FakeQuantizeBase, ObserverBase
from tests.flow import calibrated, exported
from tests.models import module_of

CONFIG = get_default_mx_quantization_config("mxfp4", "mxfp8")
QUANTIZER = MXQuantizer().set_global(CONFIG)


def converted(model, *inputs, quantizer=QUANTIZER):
    """Return a model in evaluation mode, converted, and prepared with fake quantization on."""
    prepared = calibrated(exported(model.eval(), *inputs), quantizer, *inputs)
    pt2mx.enable_fake_quant(prepared)
    return pt2mx.convert_pt2e(prepared), prepared


def pairs(model):
    """Return the specs of the pairs in a graph."""
    return [n.meta["mx_spec"] for n in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx)]


def test_trap_01_hook():
    """convert calls `convert` of modules that subclass torchao's base classes; others stay call_modules."""
    assert issubclass(MXObserver, ObserverBase) and issubclass(MXFakeQuantize, FakeQuantizeBase)
    model, _ = converted(nn.Linear(64, 8), torch.randn(2, 64))
    assert not [n for n in model.graph.nodes if n.op == "call_module" and n.target != "_guards_fn"]


def test_trap_02_constructor():
    """The observer is made with `with_args(**fields of the spec)()`, and a negative ch_axis is not allowed."""
    made = MXObserver.with_args(
        qscheme=("mx", "fp4_e2m1", 32, 1, "floor", "even"), dtype=torch.uint8, is_dynamic=False
    )()
    assert made.spec == pt2mx.MXSpec("fp4_e2m1", 32, 1)
    model, _ = converted(nn.Linear(64, 8), torch.randn(2, 64))
    assert [spec.axis for spec in pairs(model)] == [1, 1]


def test_trap_03_implicit_sharing():
    """Two consumers of one tensor got one observer whatever format, axis and block they asked for."""
    other = get_default_mx_quantization_config("mxfp4", "mxint8{16}")
    quantizer = MXQuantizer().set_global(CONFIG).set_module_name("b", other)
    shared = module_of(
        lambda self, x: (self.a(x), self.b(x), x.t() @ x),
        a=nn.Linear(64, 64, bias=False),
        b=nn.Linear(64, 64, bias=False),
    )
    model, prepared = converted(shared, torch.randn(64, 64), quantizer=quantizer)
    specs = {(s.element.name, s.block_size, s.axis) for s in pairs(model)}
    assert specs == {("fp8_e4m3", 32, 1), ("fp8_e4m3", 32, 0), ("int8", 16, 1), ("fp4_e2m1", 32, 1)}
    x = torch.randn(64, 64)
    with torch.no_grad():
        for got, want in zip(model(x), prepared(x), strict=True):
            assert torch.equal(got, want)
        want = pt2mx.fake_quantize_mx(x, "mxint8{16}") @ pt2mx.fake_quantize_mx(prepared.b.weight, "mxfp4").t()
        assert torch.equal(model(x)[1], want)


def test_trap_04_repeated_arguments():
    """Specs are keyed by node: `x @ x` and `sdpa(x, x, x)` got one for all their arguments."""
    x = torch.randn(2, 64, 64)
    config = pt2mx.get_default_mx_quantization_config("mxfp8", "mxfp8", value_blocks="key_length")
    repeated = module_of(lambda self, x: (x @ x, nn.functional.scaled_dot_product_attention(x, x, x)))
    model, _ = converted(repeated, x, quantizer=MXQuantizer().set_global(config))
    rows, columns = pt2mx.fake_quantize_mx(x, "mxfp8"), pt2mx.fake_quantize_mx(x, "mxfp8", axis=-2)
    got = model(x)
    assert torch.equal(got[0], rows @ columns)
    assert torch.equal(got[1], nn.functional.scaled_dot_product_attention(rows, rows, columns))


def test_trap_05_is_dynamic():
    """`is_dynamic=True` breaks convert."""
    prepared = pt2mx.prepare_pt2e(exported(nn.Linear(8, 8), torch.randn(2, 8)), QUANTIZER)
    assert [m.is_dynamic for m in prepared.modules() if isinstance(m, MXObserver)] == [False, False]


def test_trap_06_weights_fold():
    """torchao folds its own operators only, and would fold our dequantize as a constant."""
    model, _ = converted(nn.Linear(64, 8), torch.randn(2, 64))
    state = model.state_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in state.items() if "weight" in n} == {
        "weight_data": (torch.uint8, (8, 32)),
        "weight_scale": (torch.uint8, (8, 2)),
    }
    (data,) = [n.args[0] for n in model.graph.nodes if n.target is ops.dequantize_mx and n.args[0].op == "get_attr"]
    assert data.target == "weight_data"


def test_trap_07_meta():
    """The passes that copy meta to quantize and dequantize nodes skip foreign ones."""
    model, _ = converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.randn(2, 64))
    created = [n for n in model.graph.nodes if n.target in (ops.quantize_mx, ops.dequantize_mx, operator.getitem)]
    assert len(created) == 2 * 4 + 2  # activations; weights are folded
    assert all({"val", "stack_trace", "nn_module_stack"} <= n.meta.keys() for n in created)


def test_trap_08_batch_norm_folds_in_training():
    """torchao folds a trained convolution and batch norm around its own operators only, and no linear or 3-d one. Every
    kind of layer: tests/fx/training/test_fuse_batch_norm.py."""
    for layer, norm, shape in [
        (nn.Conv2d(32, 8, 3, bias=False), nn.BatchNorm2d(8), (2, 32, 5, 5)),
        (nn.Conv3d(32, 8, 1), nn.BatchNorm3d(8), (2, 32, 2, 2, 2)),
        (nn.Linear(32, 8), nn.BatchNorm1d(8), (6, 32)),
    ]:
        x = torch.randn(shape)
        prepared = pt2mx.prepare_qat_pt2e(exported(nn.Sequential(layer, norm).train(), x), QUANTIZER)
        prepared(x).sum().backward()
        model = pt2mx.convert_pt2e(prepared)
        with torch.no_grad():
            assert torch.equal(model(x), prepared.eval()(x))
        assert not any("batch_norm" in str(n.target) for n in model.graph.nodes)


def test_trap_09_literals_of_batch_norm_and_dropout():
    """eps and momentum became 1e-5 and 0.1, p became 0.5 (pytorch/ao#4107, #2980). In each mode, and recurrent networks
    and attention: tests/fx/training/test_train_eval.py."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=0.25, momentum=0.75), nn.Dropout(0.125)).train()
    x, reference = torch.randn(8, 4, 16, 16), copy.deepcopy(model)
    prepared = pt2mx.prepare_qat_pt2e(exported(model, x), QUANTIZER)
    pt2mx.disable_fake_quant(prepared)
    for training in (True, False, True):
        prepared.train(training)
        reference.train(training)
        torch.manual_seed(0)
        want = reference(x)
        torch.manual_seed(0)
        torch.testing.assert_close(prepared(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared.state_dict()["1.running_var"], reference[1].running_var)


def test_trap_10_subgraphs():
    """A forward under no_grad is a subgraph and stayed float. Other kinds: tests/fx/graph/test_higher_order_ops.py."""

    class NoGrad(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    x = torch.randn(2, 64)
    model, prepared = converted(NoGrad(64, 8), x)
    assert torch.equal(model(x), prepared(x)) and "weight_data" in model.state_dict()


@pytest.mark.compiled_except("prepare_qat_pt2e")
@pytest.mark.usefixtures("few_objects")
@pytest.mark.filterwarnings(
    "ignore:the exported model runs dropout in training mode"
)  # they evaluate after prepare_pt2e
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_trap_16_no_model_is_kept_alive(prepare):
    """Caches of torch and torchao kept every prepared model."""
    x = torch.randn(2, 64)
    module = exported(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 8)), x)
    kept = []
    for _ in range(20):
        prepared = prepare(module, QUANTIZER)
        prepared(x)
        model = pt2mx.convert_pt2e(prepared)
        kept += [weakref.ref(prepared), weakref.ref(model)]
    del prepared, model
    gc.collect()
    assert not [r for r in kept if r() is not None]


def test_trap_17_several_devices():
    """torchao asserts in the middle of prepare."""
    module = exported(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8))
    module.get_submodule("1").weight = nn.Parameter(torch.zeros(8, 8, device="meta"))
    with pytest.raises(MXError, match="spans the devices cpu, meta: move it to one device"):
        pt2mx.prepare_pt2e(module, QUANTIZER)


@pytest.mark.filterwarnings(
    "ignore:the exported model runs dropout in training mode"
)  # they evaluate after prepare_pt2e
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_trap_18_train_and_eval(prepare):
    """They raised on exported modules and on every parent of one."""
    prepared = prepare(exported(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), torch.randn(2, 8)), QUANTIZER)
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        parent = nn.Sequential(model, nn.Dropout(0.5))
        assert not parent.eval()[0].training and parent.train()[0].training
        assert copy.deepcopy(parent).eval()[0].training is False


def test_trap_20_integers_and_constants():
    """Integer, bool and constant tensors got observers."""

    def forward(self, tokens):
        x = self.table(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        positions = torch.cumsum(torch.ones_like(tokens), 1)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask) + positions.unsqueeze(-1)

    tokens = torch.randint(10, (2, 8))
    model, prepared = converted(module_of(forward, table=nn.Embedding(10, 64)), tokens)
    observed = [n.args[0].meta["val"].dtype for n in prepared.graph.find_nodes(op="call_module") if "post" in n.target]
    assert observed == [torch.float32] * 4
    assert torch.equal(model(tokens), prepared(tokens))


def test_trap_21_hugging_face():
    """Export needs use_cache=False; Conv1D is an addmm with a weight (in, out)."""
    transformers = import_extra("transformers", "hf")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False, resid_pdrop=0.0
    )
    model, tokens = transformers.GPT2Model(config).eval(), torch.randint(50, (1, 8))
    got, prepared = converted(model, tokens)
    weights = [n.args[2] for n in got.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)]
    assert len(weights) == 4 and all(n.meta["mx_spec"].axis == 0 for n in weights)
    with torch.no_grad():
        assert torch.equal(got(tokens)[0], prepared(tokens)[0])
