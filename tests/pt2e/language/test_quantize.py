import copy
import weakref
from collections import Counter

import pytest
import torch

import pt2mx
from pt2mx import MXError, MXQuantizer, quantize_language_model
from pt2mx.algorithms import Rotation
from pt2mx.analysis.metrics import kl_divergence
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language import quantize_graph as quantize_graph_module
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.quantize_graph import quantize_graph, without_activation_matmuls
from tests.encoder_decoders import tiny_encoder_decoder
from tests.language_models import decoder_by_recipe, exported_decoder, quantized_decoder, tiny_decoder, transformers
from tests.vision_language_models import tiny_vision_language_model


def operators(model):
    return [str(node.target) for node in model.program.graph.nodes if node.op == "call_function"]


@pytest.mark.slow_except("gpt_oss-8")
@pytest.mark.parametrize(
    ("family", "quantized"),
    [("llama", 9), ("gpt2", 7), ("gpt_oss", 8), ("mixtral", 8)],
)
@pytest.mark.compiled
def test_matmuls_with_weights_are_quantized_and_no_others(family, quantized):
    model, _ = exported_decoder(family, num_hidden_layers=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = decoder_by_recipe("mxfp8", family, num_hidden_layers=1)
    operators = pt2mx.quantization_report(result.program.module()).operators
    assert sum(operator.quantized for operator in operators) == quantized
    left = [operator for operator in operators if not operator.quantized]
    others = {"aten.scaled_dot_product_attention", "aten.matmul"}
    assert all(operator.operator in others or operator.module.endswith(("router", "mlp.gate")) for operator in left)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_report_of_the_program_is_that_of_the_converted_model():
    model, _ = exported_decoder("llama", num_hidden_layers=1)
    before = sum(parameter.nbytes for parameter in model.parameters())
    quantized = decoder_by_recipe("mxfp4_weight_only", "llama", num_hidden_layers=1)
    report = pt2mx.quantization_report(quantized.program.module())
    weights = [operand for operator in report.operators for operand in operator.operands if operand.spec]
    assert len(weights) == 9 and all(15 < weight.statistics.sqnr < 21 for weight in weights)
    assert before <= report.bytes_before < 1.1 * before and "no SQNR" not in report.summary
    (reason,) = {operator.reason for operator in report.operators if not operator.quantized}
    assert reason == "its operands are activations alone, which stay in float in a language model"


def test_converted_equals_prepared():
    (model, program), ids = exported_decoder("llama", num_hidden_layers=1), torch.randint(256, (2, 20))
    quantizer = without_activation_matmuls(MXQuantizer.from_recipe("mxfp8"))
    prepared = pt2mx.prepare_pt2e(program.module(), quantizer)

    def call(graph):
        return graph(**decoder.inputs(layers_of(model), torch.device("cpu"), ids))

    with torch.no_grad():
        call(prepared)
        pt2mx.disable_observer(prepared)
        pt2mx.enable_fake_quant(prepared)
        expected = call(prepared)
        converted = decoder_by_recipe("mxfp8", "llama", num_hidden_layers=1).program.module()
        assert torch.equal(call(converted), expected)


@pytest.mark.parametrize(("dtype", "casts"), [("float32", 8), ("bfloat16", 0)])
def test_calls_that_change_nothing_are_erased(dtype, casts, monkeypatch):
    """In bfloat16 the norms cast to float32 and back."""
    quantizer, fields = MXQuantizer.from_recipe("mxfp4_weight_only"), {"num_hidden_layers": 1, "dtype": dtype}
    result = quantized_decoder("llama", quantizer, **fields)
    with monkeypatch.context() as patch:
        patch.setattr(quantize_graph_module, "_erase_idle_calls", lambda model: None)
        whole = quantized_decoder("llama", quantizer, **fields)
    erased = Counter(operators(whole)) - Counter(operators(result))
    assert erased == +Counter({"aten._assert_tensor_metadata.default": 8, "aten.to.dtype": casts})
    ids = torch.randint(256, (2, 20))
    assert torch.equal(result(ids).logits, whole(ids).logits)
    checked = result.program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default)
    assert {node.args[0].name for node in checked} >= {"attention_mask", "start"}


@pytest.mark.compiled
@pytest.mark.parametrize("family", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mamba", "mixtral"))])
def test_lessons_train_the_weights(family):
    """On the text of the lessons the trained decoder predicts more like the float one, whose weights stay."""
    torch.manual_seed(0)
    (model, _), texts = exported_decoder(family, num_hidden_layers=1), list(torch.randint(256, (8, 1, 24)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantizer, stages = MXQuantizer.from_recipe("mxfp4_weight_only"), []

    def divergence(result):
        predict = [result(text).logits.log_softmax(-1) for text in texts]
        return float(kl_divergence(expected, torch.cat(predict)).mean())

    with torch.no_grad():
        expected = torch.cat([model(text).logits.log_softmax(-1) for text in texts])
        nearest = divergence(quantize_language_model(model, quantizer))
        lessons = texts * (16 if family == "mixtral" else 8)  # an expert takes a step where a token reaches it
        trained = quantize_language_model(model, quantizer, stage=stages.append, lessons=lessons)
        assert stages == ["export", "calibrate", "distill", "convert"]
        assert 0 < divergence(trained) < 0.9 * nearest
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    weights = [w for o in pt2mx.quantization_report(trained.program.module()).operators for w in o.operands if w.spec]
    assert weights and all(weight.spec.startswith("mxfp4") for weight in weights)


@pytest.mark.parametrize(("recipe", "tensors", "calls"), [("mxfp4_weight_only", 1, 1), ("mxfp8", 2, 2)])
def test_batches_run_while_a_tensor_is_not_observed(recipe, tensors, calls):
    (model, program), ids = exported_decoder("llama", num_hidden_layers=1), torch.randint(256, (2, 20))
    ran = []

    class Batches(list):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                ran.append(batch)

    batch = decoder.inputs(layers_of(model), torch.device("cpu"), ids)
    quantizer = without_activation_matmuls(MXQuantizer.from_recipe(recipe))
    converted = quantize_graph(program.module(), quantizer, Batches([batch, batch]))
    operands = [operand for row in pt2mx.quantization_report(converted).operators for operand in row.operands]
    assert len(ran) == calls
    assert max(operand.statistics.tensors for operand in operands if operand.statistics) == tensors


def test_lessons_are_for_models_without_a_tower():
    with pytest.raises(MXError, match="for models without a vision tower"):
        model, tokens = tiny_vision_language_model("llava"), torch.ones(1, 4, dtype=torch.long)
        quantize_language_model(model, MXQuantizer(), lessons=[tokens])
    with pytest.raises(MXError, match="must be tokens"):
        quantize_language_model(tiny_decoder("llama"), MXQuantizer(), lessons=[torch.ones(4)])


@pytest.mark.parametrize(
    ("lessons", "training", "message"),
    [
        (9, {"learning_rate": 1e-3}, "training has no option 'learning_rate': .*allowed: epochs, lr, "),
        (9, {"decay": "cosin"}, "unknown decay 'cosin': did you mean 'cosine'"),
        (9, {"warmup": 7}, "warmup=7 must be less than the number of steps, which is 7"),
        (0, {"lr": 1e-3}, "training says how lessons train: give lessons"),
    ],
)
def test_training_is_checked_before_the_export(lessons, training, message):
    stages = []
    with pytest.raises(MXError, match=message):
        texts = [torch.ones(1, 4, dtype=torch.long)] * lessons
        quantize_language_model(
            tiny_decoder("llama"), MXQuantizer(), stage=stages.append, lessons=texts, training=training
        )
    assert not stages


ROTATION = MXQuantizer.from_recipe("mxfp4_weight_only").set_algorithms({"rotation": {"online": False}})


@pytest.mark.compiled
def test_rotations_in_the_weights():
    """The program has a head of its own and no new operation, and predicts what the float model does."""
    model = tiny_decoder("llama", num_hidden_layers=1, tie_word_embeddings=True)
    ids = torch.randint(256, (2, 20))
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
        expected, before = model(ids).logits, copy.deepcopy(model.state_dict())
        up, stages = "model.model.layers.0.mlp.up_proj", []
        one_layer = MXQuantizer().set_module_name(up, pt2mx.MXQuantizationConfig(weight="mxfp8_e4m3"))
        plain = quantize_language_model(model, one_layer)
        one_layer.set_algorithms(ROTATION.algorithms)
        result = quantize_language_model(model, one_layer, stage=stages.append)
        assert kl_divergence(expected.log_softmax(-1), result(ids).logits.log_softmax(-1)).max() < 1e-3
    assert stages == ["export", "optimize", "calibrate", "convert"]
    assert not result.config.tie_word_embeddings and model.config.tie_word_embeddings
    sizes = [pt2mx.quantization_report(each) for each in (plain, result)]
    assert sizes[0].bytes_before == sizes[1].bytes_before  # of the float model, with one weight for both
    assert sizes[1].bytes_after - sizes[0].bytes_after == model.lm_head.weight.nbytes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert operators(result) == operators(plain)
    state = result.program.state_dict
    assert not torch.equal(state["model.lm_head.weight"], state["model.model.embed_tokens.weight"])


@pytest.mark.compiled
def test_models_whose_weights_hold_no_rotation():
    with pytest.raises(MXError, match=r"ln_1: aten.layer_norm .* subtracts the mean of each row"):
        quantized_decoder("gpt2", ROTATION, num_hidden_layers=1)
    with pytest.raises(MXError, match="rotations are folded into the weights of decoders of text alone"):
        quantize_language_model(tiny_encoder_decoder("t5"), ROTATION)
    if_possible = copy.copy(ROTATION).set_algorithms({"rotation": {"online": False, "strict": False}})
    with pytest.warns(
        UserWarning, match="the weights stay without rotations: rotations are folded into the weights of"
    ):
        quantize_language_model(tiny_encoder_decoder("t5"), if_possible)
    assert if_possible.algorithms == (Rotation(online=False, strict=False),)


@pytest.mark.compiled
def test_layers_make_up_for_the_layers_before():
    """A program that writes a cache has a copy of it in each run."""
    texts = [torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    weights = []
    for correction in (None, 0.25):
        quantizer = MXQuantizer.from_recipe("mxfp4").set_algorithms({"gptq": {"correction": correction}})
        language_model = quantized_decoder("llama", quantizer, texts, num_hidden_layers=2)
        weights.append(language_model.program.state_dict)
    layers = [name for name, codes in weights[0].items() if not torch.equal(codes, weights[1][name])]
    assert {name.split(".layers.")[1][0] for name in layers if ".layers." in name} == {"0", "1"}


@pytest.mark.parametrize("name", ["texts", "lessons"])
@pytest.mark.parametrize("given", [None, iter([torch.ones(1, 4, dtype=torch.long)])])
def test_texts_that_are_no_list(name, given):
    """An iterator is used up by the check."""
    with pytest.raises(MXError, match="must be a list of tokens"):
        quantize_language_model(tiny_decoder("llama"), MXQuantizer(), **{name: given})


@pytest.mark.compiled
def test_lessons_get_their_caches_one_at_a_time(monkeypatch):
    """The caches of thousands of texts would fill the memory."""
    model, alive = tiny_decoder("llama", num_hidden_layers=1), []
    make_inputs = decoder.inputs

    def watched(*args, **kwargs):
        batch = make_inputs(*args, **kwargs)
        alive[:] = [one for one in alive if one() is not None]
        alive.append(weakref.ref(batch["attention_mask"]))
        assert len(alive) < 4
        return batch

    lessons = [torch.randint(256, (1, 8)) for _ in range(16)]
    monkeypatch.setattr(decoder, "inputs", watched)
    quantize_language_model(model, MXQuantizer.from_recipe("mxfp4_weight_only"), lessons=lessons)
    assert alive


def test_algorithms_lower_the_error():
    (model, _), ids = exported_decoder("llama", num_hidden_layers=1), torch.randint(256, (1, 512))
    stages = []
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_algorithms("balanced")
    optimized = quantized_decoder("llama", quantizer, [ids], stages.append, num_hidden_layers=1)
    assert stages == ["export", "optimize", "calibrate", "convert"]
    plain = decoder_by_recipe("mxfp4_weight_only", "llama", num_hidden_layers=1)
    with torch.no_grad():
        errors = [(result(ids).logits - model(ids).logits).square().mean() for result in (plain, optimized)]
    assert errors[1] < 0.9 * errors[0]


def test_a_filter_of_the_users_stays():
    quantizer = MXQuantizer.from_recipe("mxfp8").set_filter_function(lambda node: "lm_head" not in str(node.meta))
    result = quantized_decoder("llama", quantizer, num_hidden_layers=1)
    (head,) = [o for o in pt2mx.quantization_report(result.program.module()).operators if "lm_head" in o.module]
    assert not head.quantized


def test_what_is_no_language_model_and_no_text():
    quantizer, model = MXQuantizer.from_recipe("mxfp8"), tiny_decoder("llama")
    classifier = transformers.LlamaForSequenceClassification(model.config)
    with pytest.raises(MXError, match="LlamaForSequenceClassification generates no text"):
        quantize_language_model(classifier.eval(), quantizer)
    with pytest.raises(MXError, match="not Linear"):
        quantize_language_model(torch.nn.Linear(4, 4), quantizer)
    for texts, text in (
        (torch.zeros(1, 4, dtype=torch.long), "must be a list of tokens"),
        ([torch.zeros(4, dtype=torch.long)], r"not torch.int64 of shape \(4,\)"),
        ([torch.zeros(1, 4)], "not torch.float32"),
        (["text"], "not str: tokenize"),
        ([torch.full((1, 2), 300)], "from 300 to 300: the model has 300"),
    ):
        with pytest.raises(MXError, match=text):
            quantize_language_model(model, quantizer, texts)
