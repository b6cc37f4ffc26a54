"""Names of a model's attributes decide nothing: a convolution may be called `batch_norm`, and a buffer `x_scale`."""

import warnings

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer
from pt2mx.pt2e.flow.weights import nonfinite_weights
from tests.flow import exported
from tests.models import module_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROLES = ("conv", "norm", "dropout", "linear", "act", "recurrent", "table", "scale")
#: names of operators, of inserted nodes, and of the suffixes that the flow adds to names
WORDS = ("my_batch_norm", "conv2d_0", "dropout", "linear_relu", "relu_", "my_lstm", "weight_data", "matmul_add_")
OTHERS = ("activation_post_process_x", "my_num_batches_tracked", "softmax", "quantize_mx", "copy_", "getitem", "sdpa",
          "_guards")  # fmt: skip
NAMINGS = {
    "words of other layers": (*WORDS[1:], WORDS[0]),
    "words of the next but one": (*WORDS[3:], *WORDS[:3]),
    "words of the flow": OTHERS,
}


class Net(nn.Module):
    """Every kind of layer for which prepare has a special case, under given names."""

    def __init__(self, names=ROLES):
        super().__init__()
        self.names = dict(zip(ROLES, names, strict=True))
        torch.manual_seed(0)
        layers = {
            "conv": nn.Conv2d(3, 32, 3, bias=False),
            "norm": nn.BatchNorm2d(32),
            "dropout": nn.Dropout(0.5),
            "linear": nn.Linear(32, 32),
            "act": nn.ReLU(),
            "recurrent": nn.LSTM(32, 32, batch_first=True),
            "table": nn.Embedding(4, 32),
        }
        for role, layer in layers.items():
            self.add_module(self.names[role], layer)
        self.register_parameter(self.names["scale"], nn.Parameter(torch.randn(32)))
        with torch.no_grad():
            self.of("norm").running_mean.normal_()
            self.of("norm").running_var.uniform_(0.5, 2)

    def of(self, role):
        return getattr(self, self.names[role])

    def forward(self, x):  # (B, 3, 8, 8) -> (B, 36, 32)
        x = self.of("act")(self.of("norm")(self.of("conv")(x))).flatten(2).transpose(1, 2)
        x, _ = self.of("recurrent")(self.of("dropout")(self.of("linear")(x)))
        return x * self.of("scale") + self.of("table").weight.sum(0)


def through_the_flow(model, prepare):
    """Return the outputs of the prepared model, after a training step, and of the converted model; and the names in the
    report."""
    prepared = prepare(exported(model, X), MXQuantizer.from_recipe("mxfp8"))
    torch.manual_seed(1)
    outputs = [prepared(X).detach()]
    if prepare is pt2mx.prepare_qat_pt2e:
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
        prepared(X).square().sum().backward()
        optimizer.step()
        outputs += [prepared(X).detach(), prepared.eval()(X).detach()]
    converted = pt2mx.convert_pt2e(prepared)
    with torch.no_grad():
        outputs.append(converted(X))
    return outputs, [(row.operator, row.quantized) for row in pt2mx.quantization_report(converted).operators]


@pytest.fixture(scope="module")
def plain():
    """prepare function -> the results of the model whose layers have plain names."""
    return {p: through_the_flow(Net().train(p is not pt2mx.prepare_pt2e), p) for p in PREPARES}


PREPARES = (pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e)


@pytest.mark.compiled_cases("calibrated-words of other layers")
@pytest.mark.slow_cases(
    "trained-words of the next but one", "trained-words of the flow", "calibrated-words of the next but one"
)
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch.export of an LSTM
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("prepare", PREPARES, ids=["calibrated", "trained"])
def test_a_model_computes_the_same_by_whatever_names(naming, prepare, plain):
    model = Net(NAMINGS[naming]).train(prepare is not pt2mx.prepare_pt2e)
    outputs, report = through_the_flow(model, prepare)
    want, operators = plain[prepare]
    assert len(outputs) == len(want) and all(map(torch.equal, outputs, want))
    assert report == operators and any(quantized for _, quantized in report)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 8, 3, bias=False), nn.Linear(8, 8, bias=False)], ids=["conv", "linear"])
def test_a_folded_bias_is_written_over_no_other_parameter(layer):
    """torchao names a new bias after the weight of its layer."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.norm = nn.BatchNorm1d(8) if isinstance(layer, nn.Linear) else nn.BatchNorm2d(8)
            layer.weight_bias = nn.Parameter(torch.full((8,) + (1,) * (layer.weight.dim() - 2), 3.0))
            self.norm.running_mean.fill_(0.5)

        def forward(self, x):
            return self.norm(self.layer(x)) * self.layer.weight_bias

    model, x = Named().eval(), X if layer.weight.dim() > 2 else X[0, 0]
    prepared = pt2mx.prepare_pt2e(exported(model, x), MXQuantizer.from_recipe("mxfp8"))
    assert not prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    torch.testing.assert_close(prepared(x), model(x))


def test_a_counter_that_is_no_batch_norms_counts_in_evaluation_too():
    def forward(self, x):
        self.my_num_batches_tracked.add_(1)
        return self.dropout(self.norm(self.linear(x))) + self.my_num_batches_tracked

    model = module_of(
        forward,
        linear=nn.Linear(8, 8),
        norm=nn.BatchNorm1d(8),
        dropout=nn.Dropout(0.5),
        my_num_batches_tracked=nn.Buffer(torch.zeros((), dtype=torch.int64)),
    )
    prepared = pt2mx.prepare_qat_pt2e(exported(model.train(), X[0, 0]), MXQuantizer.from_recipe("mxfp8"))
    for training in (True, False, False):
        prepared.train(training)(X[0, 0])
    assert (int(prepared.my_num_batches_tracked), int(prepared.norm.num_batches_tracked)) == (3, 1)


def test_what_is_called_a_scale_is_none():
    """The search for NaN blocks reads the scales of the graph under any name."""

    def forward(self, x):
        return self.linear(x) * self.linear.weight_scale + self.mask_data + self.mask_scale

    for spoiled, names in ((0.0, []), (float("nan"), ["linear.weight"])):
        masks = {name: nn.Buffer(torch.full((8,), 255, dtype=torch.uint8)) for name in ("mask_data", "mask_scale")}
        model = module_of(forward, linear=nn.Linear(64, 8), **masks)
        model.linear.register_buffer("weight_scale", torch.ones(8))  # folding takes another name
        model.linear.weight.data[0, 0] = spoiled
        prepared = pt2mx.prepare_pt2e(exported(model.eval(), torch.ones(2, 64)), MXQuantizer.from_recipe("mxfp8"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the NaN
            assert nonfinite_weights(pt2mx.convert_pt2e(prepared)) == names
