import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.checkpoints.select_weights import LayerSpecs, select_weights
from tests.language_models import tiny_decoder
from tests.models import chain

FP4, FP8 = MXQuantizationConfig(weight="mxfp4"), MXQuantizationConfig(weight="mxfp8", activation="mxfp8")


def net():
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2))
    return chain(rows=nn.Embedding(10, 64), blocks=nn.Sequential(*blocks), head=nn.Linear(64, 10))


def exported_specs(model, quantizer, ids):
    """Return the annotations of the exported model: parameter -> (weight, activation)."""
    prepared = pt2mx.prepare_pt2e(torch.export.export(model, (ids,)).module(), quantizer)
    result = {}
    for operator in pt2mx.quantization_report(prepared).operators:
        specs = {operand.role: operand.spec for operand in operator.operands}
        if specs.get("weight"):
            result[f"{operator.module}.weight"] = (specs["weight"], str(specs.get("activation")))
    return result


QUANTIZERS = {
    "global": MXQuantizer().set_global(FP8),
    "names": MXQuantizer().set_global(FP4).set_module_name("blocks.0", FP8).set_module_name("blocks.0.2", None),
    "patterns": MXQuantizer().set_module_name_regex(r"blocks\.\d\.0", FP4).set_module_name_regex("head", FP8),
    "types": MXQuantizer().set_global(FP4).set_object_type(nn.Embedding, None).set_object_type(nn.Sequential, FP8),
    "operators": MXQuantizer().set_object_type(torch.ops.aten.linear, FP4),
    "ends": MXQuantizer().set_global(FP4).set_first(FP8).set_last(None, 2),
    "order": MXQuantizer().set_global(FP4).set_module_name_object_type_order("blocks.1", nn.Linear, 1, FP8),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_it_is_what_the_exported_model_gets(name):
    model, quantizer = net().eval(), QUANTIZERS[name]
    chosen = select_weights(model, quantizer).chosen
    specs = {weight: (str(one.weight), str(one.activation)) for weight, one in chosen.items()}
    assert specs == exported_specs(model, quantizer, torch.arange(10)) and specs
    with torch.device("meta"):
        assert select_weights(net(), quantizer).chosen == chosen


def test_why_a_weight_is_left():
    model = net()
    model.head.weight = model.rows.weight
    quantizer = MXQuantizer().set_global(FP4).set_module_name("blocks.1", None)
    selection = select_weights(model, quantizer, {"blocks.0.0"})
    assert selection.chosen == {"blocks.0.2.weight": LayerSpecs(pt2mx.parse("mxfp4"))}
    assert selection.left == {
        "rows.weight": "it is head.weight too",
        "head.weight": "it is rows.weight too",
        "blocks.0.0.weight": "the caller excludes it",
        "blocks.1.0.weight": "excluded by module_name 'blocks.1'",
        "blocks.1.2.weight": "excluded by module_name 'blocks.1'",
    }


def test_subclasses_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert select_weights(nn.Sequential(Scaled(4, 4), nn.Conv1d(4, 4, 1)), QUANTIZERS["global"]).chosen == {}


def test_experts_and_tied_weights_of_transformers():
    quantizer = MXQuantizer().set_global(FP4).set_object_type("aten._grouped_mm", FP8)
    chosen = select_weights(tiny_decoder("mixtral"), quantizer).chosen
    experts = {weight: specs for weight, specs in chosen.items() if "experts" in weight}
    assert len(experts) == 4 and {specs.weight for specs in experts.values()} == {pt2mx.parse("mxfp8")}
    with torch.device("meta"):
        tied = select_weights(tiny_decoder("gemma2"), quantizer)
    assert tied.left["lm_head.weight"] == "it is model.embed_tokens.weight too"


def test_formats_that_no_checkpoint_holds():
    for config in (
        MXQuantizationConfig(weight="mxfp4", bias="mxfp8"),
        MXQuantizationConfig(weight="mxfp4", output="mxfp8"),
    ):
        with pytest.raises(MXError, match="a format of a bias or an output"):
            select_weights(net(), MXQuantizer().set_global(config))


def test_a_weight_in_float64():
    with pytest.raises(MXError, match="float64"):
        select_weights(net().double(), QUANTIZERS["global"])
