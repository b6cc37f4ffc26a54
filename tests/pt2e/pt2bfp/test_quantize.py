import copy
import io

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.pt2e import pt2bfp
from tests.compare import same
from tests.flow import convert as converted_graph

BFP16 = pt2bfp.MinMaxObserver.with_args(dtype="BFP[8|8]{16}(SN)")
QCONFIG = pt2bfp.QConfig(BFP16, BFP16)
FP4 = pt2mx.MXQuantizationConfig(activation="mxfp8", weight="mxfp4", bias="mxint8", output="mxint16")


def ids(*shape):
    return torch.randint(0, 20, shape)


#: layer, inputs, inputs of another size
LAYERS = {
    "linear": (nn.Linear(40, 6), (torch.randn(2, 40),), (torch.randn(3, 5, 40),)),
    "conv1d": (nn.Conv1d(20, 6, 3), (torch.randn(2, 20, 9),), (torch.randn(20, 7),)),
    "conv2d": (nn.Conv2d(20, 6, 3, padding=1), (torch.randn(2, 20, 5, 5),), (torch.randn(1, 20, 6, 4),)),
    "depthwise": (nn.Conv1d(20, 20, 3, groups=20), (torch.randn(2, 20, 9),), (torch.randn(20, 7),)),
    "conv3d": (nn.Conv3d(20, 6, 2), (torch.randn(2, 20, 3, 3, 3),), (torch.randn(1, 20, 4, 3, 2),)),
    "conv_transpose1d": (nn.ConvTranspose1d(20, 6, 3), (torch.randn(2, 20, 9),), (torch.randn(1, 20, 7),)),
    "conv_transpose2d": (nn.ConvTranspose2d(20, 6, 3), (torch.randn(2, 20, 5, 5),), (torch.randn(1, 20, 6, 4),)),
    "conv_transpose3d": (nn.ConvTranspose3d(20, 6, 2), (torch.randn(2, 20, 3, 3, 3),), (torch.randn(1, 20, 4, 3, 2),)),
    "embedding": (nn.Embedding(20, 40, padding_idx=0), (ids(2, 5),), (ids(7),)),
    "embedding_bag": (nn.EmbeddingBag(20, 40), (ids(2, 5),), (ids(3, 4),)),
    "lstm": (nn.LSTM(40, 12, 2, bidirectional=True, proj_size=5), (torch.randn(3, 2, 40),), (torch.randn(5, 1, 40),)),
    "gru": (nn.GRU(40, 12, batch_first=True), (torch.randn(2, 3, 40),), (torch.randn(1, 2, 40),)),
    "rnn": (nn.RNN(40, 12, nonlinearity="relu"), (torch.randn(3, 2, 40),), (torch.randn(4, 40),)),
    "lstm_cell": (
        nn.LSTMCell(40, 12),
        (torch.randn(2, 40), (torch.randn(2, 12), torch.randn(2, 12))),
        (torch.randn(3, 40),),
    ),
    "gru_cell": (nn.GRUCell(40, 12), (torch.randn(2, 40), torch.randn(2, 12)), (torch.randn(3, 40),)),
    "rnn_cell": (nn.RNNCell(40, 12), (torch.randn(2, 40), torch.randn(2, 12)), (torch.randn(40),)),
}


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        y = self.layer(*args)
        return y if isinstance(y, torch.Tensor) else y[0]


@pytest.mark.compiled_except("linear", "conv2d", "conv_transpose1d", "embedding_bag", "gru", "lstm_cell")
@pytest.mark.filterwarnings("ignore:The tensor attributes self.layer._flat_weights")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_computes_as_in_an_exported_graph(name):
    layer, inputs, others = LAYERS[name]
    model = Wrapped(layer).eval()
    model.qconfig = QCONFIG
    prepared = pt2bfp.prepare(model)
    assert same(prepared(*inputs), model(*inputs)) and same(prepared(*others), model(*others))
    converted = pt2bfp.convert(prepared)
    graph = converted_graph(model, inputs, MXQuantizer().set_global(QCONFIG))
    assert same(converted(*inputs), graph(*inputs))
    packed = {name for name, _ in graph.named_buffers() if name.endswith(("_data", "_scale"))}
    assert packed and packed == {name for name in converted.state_dict() if name.endswith(("_data", "_scale"))}
    pt2bfp.enable_fake_quant(prepared)
    assert same(prepared(*others), converted(*others))
    assert same(copy.deepcopy(converted)(*others), converted(*others))


@torch.no_grad()
def test_every_role():
    model, x = Wrapped(nn.Linear(40, 6)).eval(), torch.randn(3, 40)
    model.layer.qconfig = FP4
    converted = pt2bfp.convert(pt2bfp.prepare(model))
    assert same(converted(x), converted_graph(model, (x,), MXQuantizer().set_global(FP4))(x))
    assert sorted(converted.state_dict()) == [
        "layer.bias_data",
        "layer.bias_scale",
        "layer.weight_data",
        "layer.weight_scale",
    ]


class Net(nn.Module):
    """Layers at two depths, one used twice, one excluded, and an attention, which uses the weights of its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 4)
        self.again = self.block[0]
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.again(self.block(x))
        return self.head(self.attention(x, x, x)[0])


def prepared_net(**options):
    model = Net().eval()
    model.qconfig, model.head.qconfig = QCONFIG, None
    return model, pt2bfp.prepare(model, **options)


def test_submodules_by_the_qconfig_around_them():
    model, prepared = prepared_net()
    kinds = {name: type(m).__name__ for name, m in prepared.named_modules(remove_duplicate=False)}
    layers = ("block.0", "block.2", "again", "head", "attention.out_proj")
    assert [kinds[name] for name in layers] == [
        *["ObservedLayer"] * 3,
        "Linear",
        "NonDynamicallyQuantizableLinear",
    ]
    assert prepared.again is prepared.block[0] and type(model.again) is nn.Linear
    names = dict(model.named_parameters())
    assert set(names) == set(dict(prepared.named_parameters()))
    prepared(torch.randn(2, 3, 16))
    assert prepared.block[0].observers["weight"].statistics.values == 256
    assert prepared.block[0].in_features == 16
    converted = pt2bfp.convert(prepared)
    assert converted.again is converted.block[0]
    assert not any("qconfig" in vars(m) for m in converted.modules())
    assert "qconfig" in vars(pt2bfp.convert(prepared, remove_qconfig=False))


def test_in_place_and_a_single_layer():
    model, prepared = prepared_net(inplace=True)
    assert prepared is model and pt2bfp.convert(prepared, inplace=True) is model
    layer = nn.Linear(16, 4).eval()
    layer.qconfig = QCONFIG
    assert type(pt2bfp.convert(pt2bfp.prepare(layer))) is pt2bfp.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS[nn.Linear]


def test_mappings():
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(16, 4)).eval()
    model.qconfig = QCONFIG
    x = torch.randn(2, 16, 1, 1)
    prepared = pt2bfp.prepare(model)
    linear = pt2bfp.convert(prepared, {nn.Linear: pt2bfp.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS[nn.Linear]})
    assert [type(m).__name__ for m in linear] == ["Conv2d", "Flatten", "QuantizedLayer"]
    assert same(linear[0](x), model[0](x))

    class Replacement(nn.Identity):
        @classmethod
        def from_float(cls, module):
            assert module.weight.shape == (4, 16) and module.qconfig.weight == QCONFIG.weight
            return cls()

    mapping = pt2bfp.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS | {nn.Linear: Replacement}
    assert [type(m) for m in pt2bfp.convert(prepared, mapping)][2] is Replacement
    assert len(pt2bfp.prepare(model, allow_list={nn.Linear})[2].observers) == 2
    # without observers
    assert type(pt2bfp.convert(Wrapped(prepared[2]))).__name__ == "Wrapped"
    model[2].qconfig = QCONFIG
    assert same(pt2bfp.convert(model)[2](x.flatten(1)), pt2bfp.convert(prepared)[2](x.flatten(1)))


def test_training():
    model = Net().train()
    model.qconfig = QCONFIG
    qat = pt2bfp.prepare_qat(model)
    optimizer, x = torch.optim.SGD(qat.parameters(), lr=0.01), torch.randn(2, 3, 16)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(qat(x).square().sum())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] and qat.block[0].weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert same(pt2bfp.convert(qat.eval())(x), qat(x))


@torch.no_grad()
def test_a_recurrent_layer_trains_and_evaluates():
    layer, x = nn.LSTM(40, 12, 2, dropout=0.5).train(), torch.randn(3, 2, 40)
    layer.qconfig = QCONFIG
    qat = pt2bfp.prepare_qat(layer)
    assert qat.training and not same(qat(x)[0], qat(x)[0])
    converted = pt2bfp.convert(qat.eval())
    assert not converted.training and same(converted(x)[0], qat(x)[0])
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    for other in (copy.deepcopy(converted), torch.load(file, weights_only=False)):
        assert same(other(x)[0], converted(x)[0])
    assert same(pt2bfp.convert(qat, {})(x)[0], layer.eval()(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, torch.tensor([[False] * 5, [False] * 3 + [True] * 2])])
def test_encoders_call_their_layers(mask):
    """In evaluation, torch's encoders use the weights of their layers without calling them."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    model.qconfig = QCONFIG
    prepared = pt2bfp.prepare(model)
    prepared(x, src_key_padding_mask=mask)
    assert prepared.layers[1].linear2.observers["input"].statistics.values > 0
    converted = pt2bfp.convert(prepared)
    pt2bfp.enable_fake_quant(prepared)
    y = converted(x, src_key_padding_mask=mask)
    assert same(y, prepared(x, src_key_padding_mask=mask))
    assert model.use_nested_tensor and not converted.use_nested_tensor
    want = model.train()(x, src_key_padding_mask=mask)  # without dropout, layer by layer
    assert 0 < (y - want).norm() < 0.05 * want.norm()


@torch.no_grad()
def test_packed_sequences():
    layer, x = nn.LSTM(40, 12, bidirectional=True).eval(), [torch.randn(length, 40) for length in (5, 3)]
    layer.qconfig = QCONFIG
    prepared = pt2bfp.prepare(layer)
    prepared(nn.utils.rnn.pack_sequence(x))
    converted = pt2bfp.convert(prepared)
    y = nn.utils.rnn.unpack_sequence(converted(nn.utils.rnn.pack_sequence(x))[0])
    for packed, sequence in zip(y, x, strict=True):
        torch.testing.assert_close(packed, converted(sequence)[0])


@torch.no_grad()
def test_a_parameter_with_two_names():
    layer, x = nn.RNN(40, 40).eval(), torch.randn(3, 2, 40)
    layer.weight_hh_l0, layer.qconfig = layer.weight_ih_l0, QCONFIG
    prepared = pt2bfp.prepare(layer)
    assert same(prepared(x)[0], layer(x)[0])
    pt2bfp.enable_fake_quant(prepared)
    assert same(pt2bfp.convert(prepared)(x)[0], prepared(x)[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("reparametrized", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_a_weight_that_is_computed_from_others_is_refused(reparametrized):
    layer = reparametrized(nn.Linear(16, 4))
    layer.qconfig = QCONFIG
    with pytest.raises(MXError, match=r"Linear\(.*\) computes its weight from weight_(orig|g): remove"):
        pt2bfp.prepare(layer, inplace=True)


def test_repr_and_missing_attributes_of_a_quantized_layer():
    layer = nn.Linear(16, 4)
    layer.qconfig = QCONFIG
    converted = pt2bfp.convert(pt2bfp.prepare(layer))
    assert repr(converted) == f"QuantizedLayer({layer})" and "bias=True" in repr(converted)
    with pytest.raises(AttributeError, match="has no weight, but codes and scales, weight_data and weight_scale"):
        _ = converted.weight


@pytest.mark.compiled
def test_converted_modules_can_be_saved_moved_and_exported():
    x = torch.randn(2, 3, 16)
    _, prepared = prepared_net()
    converted = pt2bfp.convert(prepared)
    other = pt2bfp.convert(prepared_net()[1])
    other.load_state_dict(converted.state_dict())
    with torch.no_grad():
        assert same(other(x), converted(x))
        program = torch.export.export(converted, (x,))
        assert same(program.module()(x), converted(x))
        assert same(torch.compile(converted, backend="eager")(x), converted(x))
        assert converted.half()(x.half()).dtype == torch.float16
    assert not any(p.requires_grad for p in converted.block.parameters())


@pytest.mark.parametrize(
    ("qconfig", "arguments", "message"),
    [
        (None, {}, "no layer that can be quantized has a qconfig"),
        ("mxfp8", {}, "expected an MXQuantizationConfig"),
        (QCONFIG, {"allow_list": {nn.ReLU}}, "the type ReLU is not quantized: allowed are Linear, Conv1d"),
        (pt2bfp.QConfig(pt2bfp.default_fake_quant, None), {}, "activation: eager modules have block formats alone"),
    ],
)
def test_bad_arguments(qconfig, arguments, message):
    model = Net()
    model.qconfig = qconfig
    with pytest.raises(MXError, match=message):
        pt2bfp.prepare(model, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pt2bfp.prepare("model"), "expected a module, not str"),
        (lambda: pt2bfp.convert([nn.Linear(2, 2)]), "expected a module, not list"),
        (lambda: pt2bfp.convert(Net(), {nn.Linear: nn.Linear}), "class that has a from_float"),
        (lambda: pt2bfp.convert(Net(), nn.Linear), "must be a dictionary"),
    ],
)
def test_other_objects(call, message):
    with pytest.raises(MXError, match=message):
        call()
