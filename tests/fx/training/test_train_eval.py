import copy
import warnings

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.training.train_eval import Counter, TrainEvalOp, to_evaluation, to_train_eval_modules
from tests.models import module_of
from tests.training_models import WITH_MODES

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn:UserWarning")  # torch.export

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config("mxint8", "mxint8"))


@pytest.mark.parametrize("name", WITH_MODES)
def test_train_and_eval_switch_what_the_model_had(name):
    """The prepared model in high precision and the model itself, in each mode, with the same random numbers."""
    model, shape = WITH_MODES[name]
    model, x = copy.deepcopy(model).train(), torch.randn(shape)
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), QUANTIZER)
    assert prepared.training
    pt2mx.disable_fake_quant(prepared)
    parent = nn.ModuleDict({"inner": prepared})
    for training in (True, False, True):
        parent.train(training)
        model.train(training)
        torch.manual_seed(1)
        want = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(prepared(x), want)
    trained = prepared.state_dict()
    for key, value in model.state_dict().items():
        if key in trained:  # instance norm never reads the number of its batches
            torch.testing.assert_close(trained[key], value)
    copied = copy.deepcopy(prepared).eval()
    torch.testing.assert_close(copied(x), model.eval()(x))
    assert prepared.training  # the copy has its own mode


@pytest.mark.parametrize("name", [name for name in WITH_MODES if name not in ("attention", "stochastic depth")])
def test_a_model_exported_in_evaluation_can_train(name):
    model, shape = WITH_MODES[name]
    model, x = copy.deepcopy(model).eval(), torch.randn(shape)
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), QUANTIZER)
    assert not prepared.training
    pt2mx.disable_fake_quant(prepared)
    torch.testing.assert_close(prepared(x), model(x))
    torch.manual_seed(1)
    want = model.train()(x)
    torch.manual_seed(1)
    torch.testing.assert_close(prepared.train()(x), want)


def test_a_frozen_batch_norm_stays_frozen():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    model[1].eval()
    x = torch.randn(16, 8)
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), QUANTIZER).eval().train()
    prepared(x)
    assert torch.equal(prepared.state_dict()["1.running_mean"], torch.zeros(8))
    assert (prepared(x) == 0).any()


@pytest.mark.filterwarnings(
    "ignore:the exported model runs dropout in training mode"
)  # they evaluate after prepare_pt2e
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_a_converted_model_evaluates_in_both_modes(prepare):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), torch.randn(4, 8)
    prepared = prepare(torch.export.export(model, (x,)).module(), QUANTIZER)
    assert prepared.training == (prepare is pt2mx.prepare_qat_pt2e)  # calibration drops nothing out
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    with torch.no_grad():
        want = prepared.eval()(x)
        assert torch.equal(converted(x), want)
        assert torch.equal(converted.train()(x), want)
        assert torch.equal(nn.Sequential(converted).eval()(x), want)


@pytest.mark.filterwarnings("ignore:the exported model runs .* in training mode")
def test_a_warning_names_what_draws_random_numbers_in_both_modes():
    x = torch.randn(4, 8)
    decomposed = torch.export.export(nn.AlphaDropout(0.5).train(), (x,)).run_decompositions()
    graphs = [("bernoulli", decomposed.module())]
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    samples = module_of(lambda self, x: self.layers(x) + torch.randn_like(x), layers=layers)
    graphs += [("randn_like", torch.export.export(samples.train(mode), (x,)).module()) for mode in (True, False)]
    for i, (name, graph) in enumerate(graphs):
        for prepare in (pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                converted = pt2mx.convert_pt2e(prepare(graph, QUANTIZER))
            texts = [str(w.message) for w in caught if "draw random numbers in evaluation" in str(w.message)]
            assert not torch.equal(converted(x), converted(x))
            # a model that samples in evaluation does so on purpose
            assert [text.split(" ")[0] for text in texts] == ([name] if i < 2 else [])


@pytest.mark.compiled_except("dropout in place")
@pytest.mark.parametrize("name", ["dropout in place", "dropout2d in place", "stochastic depth"])
def test_a_decomposed_dropout_evaluates(name):
    model, shape = WITH_MODES[name]
    model, x = copy.deepcopy(model).train(), torch.randn(shape)
    decomposed = torch.export.export(model, (x,)).run_decompositions().module()
    with pytest.warns(UserWarning, match="the exported model runs div.* in training mode"):
        prepared = pt2mx.prepare_pt2e(decomposed, QUANTIZER)
    torch.testing.assert_close(prepared(x), model.eval()(x))
    torch.testing.assert_close(pt2mx.convert_pt2e(prepared)(x), model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", WITH_MODES)
def test_evaluation_writes_nothing(name):
    model, shape = WITH_MODES[name]
    x = torch.randn(shape)
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(copy.deepcopy(model).train(), (x,)).module(), QUANTIZER)
    prepared(x)
    pt2mx.disable_fake_quant(prepared.eval())
    for evaluated in (prepared, pt2mx.convert_pt2e(prepared)):
        before = {key: value.clone() for key, value in evaluated.state_dict().items()}
        evaluated(x)
        assert not [key for key, value in evaluated.state_dict().items() if not torch.equal(value, before[key])]


@pytest.mark.compiled
def test_torchaos_switches_do_the_same():
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), torch.randn(4, 8)
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), QUANTIZER)
    move_exported_model_to_eval(prepared)
    assert not prepared.training and not (prepared(x) == 0).any()
    move_exported_model_to_train(prepared)
    assert prepared.training and (prepared(x) == 0).any()


def test_operators_of_the_graph_before_and_after():
    model = torch.export.export(
        nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(4)).train(), (torch.randn(2, 4),)
    ).module()
    assert to_train_eval_modules(model)
    kinds = [type(m) for m in model.children() if isinstance(m, TrainEvalOp)]
    assert kinds == [TrainEvalOp, Counter, TrainEvalOp]
    to_evaluation(model)
    targets = [node.target for node in model.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.dropout.default, torch.ops.aten.batch_norm.default]
    dropout, norm = (node for node in model.graph.nodes if node.op == "call_function")
    assert dropout.args[1:] == (0.3, False) and norm.args[5] is False
