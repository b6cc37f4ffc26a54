"""Training loops with a prepared model."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from tests.flow import assert_converts_to_the_bit
from tests.models import chain
from tests.rank_processes import results_of_ranks

MXFP8 = get_default_mx_quantization_config()


def block():
    torch.manual_seed(0)
    layers = {"up": nn.Linear(32, 64), "relu": nn.ReLU(), "norm": nn.LayerNorm(64), "drop": nn.Dropout(0.2)}
    return chain(**layers, down=nn.Linear(64, 8))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.fc = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def data(model, n=16, dtype=torch.float32):
    """The same inputs and labels each time."""
    generator = torch.Generator().manual_seed(1)
    shape = (n, 32) if isinstance(model, nn.Sequential) else (n, 3, 8, 8)
    return torch.randn(shape, generator=generator).to(dtype), torch.randint(8, (n,), generator=generator)


def prepare(model=None, config=MXFP8):
    model = model or block()
    x, _ = data(model, 4, next(model.parameters()).dtype)
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model.train(), (x,), dynamic_shapes=shapes).module()
    return pt2mx.prepare_qat_pt2e(exported, MXQuantizer().set_global(config))


def train(model, batch, steps, optimizer=None, autocast=False):
    """The loss of each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.3)
    (x, labels), losses = batch, []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        loss = nn.functional.cross_entropy(y.float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradients(model, x, labels):
    model.zero_grad()
    y = model(x)
    nn.functional.cross_entropy(y, labels).backward()
    return [y, *(p.grad for p in model.parameters())]


@pytest.mark.compiled_except("block")
@pytest.mark.parametrize("kind", [ConvNet, block])
def test_compiled_training_is_one_graph_with_the_bits_of_eager(kind, compiler):
    """Without Inductor's own kernels; with them, see tests/test_training.py."""
    prepared = prepare(kind())
    x, labels = data(kind())
    before, results = copy.deepcopy(prepared.state_dict()), []
    for model in (prepared, torch.compile(prepared, backend="aot_eager", fullgraph=True)):
        prepared.load_state_dict(before)  # batch norm's statistics
        torch.manual_seed(2)  # dropout
        y, *grads = gradients(model, x, labels)
        results.append((y, copy.deepcopy(list(prepared.buffers())), grads))
    (want, statistics, want_grads), (got, got_statistics, got_grads) = results
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(got_statistics, statistics, strict=True))
    # traced, the gradient of a batch norm is written in other operators, and sums in another order
    tolerance = {ConvNet: 1e-5, block: 0}[kind]
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_autocast():
    prepared = prepare()
    x, labels = data(block())
    losses = train(prepared, (x, labels), 20, autocast=True)
    assert losses[-1] < 0.7 * losses[0]
    assert {p.dtype for p in prepared.parameters()} == {torch.float32}
    assert_converts_to_the_bit(prepared, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_converts_to_the_bit(prepared, x)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [block, ConvNet])
def test_models_in_half_precision(kind, dtype):
    prepared = prepare(kind().to(dtype))
    x, labels = data(kind(), dtype=dtype)
    losses = train(prepared, (x, labels), 30)
    assert losses[-1] < 0.9 * losses[0]
    assert_converts_to_the_bit(prepared, x)


def test_stochastic_rounding_of_weights():
    config = get_default_mx_quantization_config(weight="mxfp4(stochastic)", activation="mxfp8")
    prepared = prepare(config=config).eval()
    x, labels = data(block())
    with torch.no_grad():
        assert not torch.equal(prepared(x), prepared(x))
    before, runs = copy.deepcopy(prepared.state_dict()), []
    for seed in (3, 3, 4):
        prepared.load_state_dict(before)
        torch.manual_seed(seed)
        runs.append(train(prepared, (x, labels), 5))
    assert runs[0] == runs[1] != runs[2]
    # the converted model keeps one draw: every weight is one of its two neighbours, and both kinds occur
    converted = pt2mx.convert_pt2e(prepared)
    state, weight = converted.state_dict(), prepared.state_dict()["up.weight"]
    held = pt2mx.dequantize_mx(state["up.weight_data"], state["up.weight_scale"], "mxfp4")
    below, above = (pt2mx.fake_quantize_mx(weight, f"mxfp4({rounding})") for rounding in ("down", "up"))
    assert ((held == below) | (held == above)).all()
    assert ((held == below) & (below < weight)).any() and ((held == above) & (above > weight)).any()
    with torch.no_grad():
        assert torch.equal(converted(x), converted(x))


def test_resumed_training_takes_the_same_steps(tmp_path):
    x, labels = data(ConvNet())
    first = prepare(ConvNet())
    optimizer = torch.optim.AdamW(first.parameters(), 1e-2)
    train(first, (x, labels), 3, optimizer)
    torch.save((first.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    want = train(first, (x, labels), 3, optimizer)

    second = prepare(ConvNet())
    optimizer = torch.optim.AdamW(second.parameters(), 1e-2)
    state, optimizer_state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    assert train(second, (x, labels), 3, optimizer) == want
    assert_converts_to_the_bit(second, x)


def test_fake_quantization_switched_on_during_training():
    """With fake quantization off, the steps equal the float model's steps, to the bit."""
    x, labels = data(block())
    model, prepared = block().eval(), prepare().eval()
    pt2mx.disable_fake_quant(prepared)
    assert train(prepared, (x, labels), 3) == train(model, (x, labels), 3)
    want = model(x)
    pt2mx.enable_fake_quant(prepared)
    assert not torch.equal(prepared(x), want)
    losses = train(prepared, (x, labels), 3)
    assert losses[-1] < losses[0] and losses != train(model, (x, labels), 3)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    prepared = prepare().eval()
    x, labels = data(block())
    _, *want = gradients(prepared, x, labels)
    prepared.zero_grad()
    for part in (slice(0, 8), slice(8, 16)):
        (nn.functional.cross_entropy(prepared(x[part]), labels[part]) / 2).backward()
    for p, gradient in zip(prepared.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)


def train_on_half(rank):
    """One of two processes: four steps on its half of the batch with DDP, then with FSDP2."""
    x, labels = (part[8 * rank : 8 * rank + 8] for part in data(block()))
    results = {}
    mesh = init_device_mesh("cpu", (2,))  # also where there is a GPU
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp": partial(fully_shard, mesh=mesh)}.items():
        prepared = prepare().eval()
        model = wrap(prepared)
        losses = train(model, (x, labels), 4)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        results[name] = losses, state
    return results


@pytest.mark.compiled
def test_two_processes_take_the_steps_of_one():
    """Gradients are the means over the halves, so only the order of sums differs."""
    first, second = results_of_ranks(train_on_half)
    x, labels = data(block())
    prepared = prepare().eval()
    want = torch.tensor(train(prepared, (x, labels), 4))
    for name in ("ddp", "fsdp"):
        losses = (torch.tensor(first[name][0]) + torch.tensor(second[name][0])) / 2
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)
        gathered = prepare()
        gathered.load_state_dict(first[name][1])
        for got, parameter in zip(gathered.parameters(), prepared.parameters(), strict=True):
            torch.testing.assert_close(got, parameter, rtol=1e-4, atol=1e-6)
        assert_converts_to_the_bit(gathered, x)


def train_compiled_on_half(rank):
    """One of two processes: two steps of a convolution and its batch norm with DDP, eager and compiled."""
    x, labels = (part[8 * rank : 8 * rank + 8] for part in data(ConvNet()))
    results = []
    for compiled in (False, True):
        model = DistributedDataParallel(prepare(ConvNet()))
        called = torch.compile(model, backend="aot_eager_decomp_partition") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = train(called, (x, labels), 2, optimizer)
        results.append((losses, [p.grad for p in model.parameters()], model.module.state_dict()))
    return results


@pytest.mark.slow  # two processes import torch and compile
def test_compiled_training_of_two_processes_is_that_of_eager():
    for eager, compiled in results_of_ranks(train_compiled_on_half, method="spawn"):
        torch.testing.assert_close(torch.tensor(compiled[0]), torch.tensor(eager[0]), rtol=1e-4, atol=0)
        for got, want in zip(compiled[1], eager[1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item() + 1e-6)
        for key, want in eager[2].items():
            torch.testing.assert_close(compiled[2][key], want, rtol=1e-3, atol=1e-4, msg=key)


INT8 = MXQuantizer().set_global(get_default_mx_quantization_config("mxint8", "mxint8"))


class Lists(nn.Module):
    """Parameters in a list, or in a ParameterList, and tensors that are none."""

    def __init__(self, kind=list):
        super().__init__()
        self.layer, self.matrices = nn.Linear(8, 8), kind([nn.Parameter(torch.randn(8, 8))])
        self.matrices.append(nn.Parameter(torch.randn(8)))
        self.table = torch.randn(8)

    def forward(self, x):
        y = self.layer(x) @ self.matrices[0] + self.matrices[1] * self.table
        return y * torch.tensor([1.0, 2.0]).repeat(4) + torch.tensor(3.0)


@pytest.mark.parametrize("decompose", [lambda program: program, lambda program: program.run_decompositions()])
def test_a_warning_names_parameters_that_export_made_constants(decompose):
    x = torch.randn(4, 8)
    graph = decompose(torch.export.export(Lists(), (x,))).module()
    names = r"lifted_tensor_\d \(8, 8\), lifted_tensor_\d \(8,\)"
    with pytest.warns(UserWarning, match=rf"^{names} are constants of the exported model.*nn.ParameterList") as caught:
        prepared = pt2mx.prepare_qat_pt2e(graph, INT8)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {name for name, _ in prepared.named_parameters()} == {"layer.weight", "layer.bias"}
    pt2mx.prepare_pt2e(graph, INT8)  # trains nothing, and does not warn
    listed = pt2mx.prepare_qat_pt2e(torch.export.export(Lists(nn.ParameterList), (x,)).module(), INT8)
    assert {"matrices.0", "matrices.1"} <= {name for name, _ in listed.named_parameters()}
