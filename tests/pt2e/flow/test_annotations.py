import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXFormatObserver, MXObserver, MXSpec, mx_qspec
from tests.models import module_of

LINEAR = torch.ops.aten.linear.default


class Own(Quantizer):
    """Annotates linear layers with given specs of input, weight and output."""

    def __init__(self, *specs):
        self.specs = specs

    def annotate(self, model):
        for node in model.graph.find_nodes(op="call_function", target=LINEAR):
            *inputs, output = self.specs
            specs = {read: spec for read, spec in zip(node.args, inputs, strict=False) if spec is not None}
            node.meta["quantization_annotation"] = QuantizationAnnotation(specs, output, _annotated=True)
        return model

    def validate(self, model):
        pass


def exported(model=None):
    torch.manual_seed(0)
    return torch.export.export((model or nn.Linear(64, 8)).eval(), (torch.randn(4, 64),)).module()


@pytest.mark.diagonal
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
@pytest.mark.parametrize(
    "spec",
    [MXSpec("mxfp4"), "mxfp4", pt2mx.get_default_mx_quantization_config(), MXObserver, torch.uint8],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("place", range(3))
def test_what_is_no_spec_is_refused_with_the_function_that_makes_one(place, spec, prepare):
    specs = [mx_qspec("mxfp8")] * 3
    specs[place] = spec
    text = rf"Own annotates linear \(aten\.linear\.default\) with .* of type {type(spec).__name__}: .*mx_qspec\(spec\)"
    with pytest.raises(MXError, match=text):
        prepare(exported(), Own(*specs))


class Annotating(Own):
    """A quantizer that annotates each linear layer with what a function makes of it."""

    def __init__(self, make):
        self.make = make

    def annotate(self, model):
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            node.meta["quantization_annotation"] = self.make(node)
        return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda node: {node.args[1]: mx_qspec("mxfp4")},
            "of type dict: the meta 'quantization_annotation' is a Quanti",
        ),
        (lambda node: QuantizationAnnotation({"weight": mx_qspec("mxfp4")}), "'weight', which is none of its inputs"),
        (
            lambda node: QuantizationAnnotation({node: mx_qspec("mxfp4")}),
            "'linear', which is none of its inputs: the keys of input_qspec_map are nodes, .* input_1, weight, bias",
        ),
    ],
)
def test_an_annotation_of_another_form_is_refused(make, message):
    with pytest.raises(MXError, match=rf"Annotating annotates linear \(aten\.linear\.default\) with .*{message}"):
        pt2mx.prepare_pt2e(exported(), Annotating(make))


@pytest.mark.parametrize("observer", [3, "MXObserver", MXSpec])
def test_what_constructs_no_observer_is_refused(observer):
    with pytest.raises(MXError, match=r"constructs no observer: pass a class such as pt2mx\.MXObserver"):
        mx_qspec("mxfp4", observer)


def test_in_graphs_inside_too():
    class Inner(Own):
        def annotate(self, model):
            for graph in model.modules():
                if isinstance(graph, torch.fx.GraphModule):
                    super().annotate(graph)
            return model

    with pytest.raises(MXError, match=r"Inner annotates linear.* 'mxfp4' of type str"):
        # a linear layer in a subgraph of a subgraph
        branches = module_of(
            lambda self, x: torch.cond(x.sum() > 0, lambda x: self.layer(x) + 1, lambda x: x[:, :8] * 2, (x,)),
            layer=nn.Linear(64, 8),
        )
        pt2mx.prepare_pt2e(exported(branches), Inner("mxfp4", None, None))


@pytest.mark.parametrize("qscheme", [None, torch.per_tensor_affine, ("int8",), MXSpec("mxfp4")])
def test_an_mx_observer_without_an_mx_spec_is_refused(qscheme):
    wrong = QuantizationSpec(dtype=torch.uint8, observer_or_fake_quant_ctr=MXObserver, qscheme=qscheme)
    with pytest.raises(MXError, match=r"^qscheme=.* is no MX spec: annotate with pt2mx\.mx_qspec\(spec, observer\)"):
        pt2mx.prepare_pt2e(exported(), Own(wrong, None, None))


def test_a_quantizer_of_ones_own_gives_the_numbers_of_mxquantizer():
    config = pt2mx.MXQuantizationConfig(weight="mxfp4", activation="mxfp8", output="mxint8")
    own = Own(mx_qspec("mxfp8"), mx_qspec(MXSpec("mxfp4")), mx_qspec("mxint8"))
    x, model = torch.randn(4, 64), exported()
    for prepare, kind in ((pt2mx.prepare_pt2e, MXObserver), (pt2mx.prepare_qat_pt2e, MXFakeQuantize)):
        results = []
        for quantizer in (own, pt2mx.MXQuantizer().set_global(config)):
            prepared = prepare(model, quantizer)
            assert [type(module) for module in prepared.modules() if isinstance(module, MXObserver)] == [kind] * 3
            converted = pt2mx.convert_pt2e(prepared)
            with torch.no_grad():
                results += [converted(x), pt2mx.lower_to_inductor(converted)(x)]
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_specs_of_torchao_pass():
    class Shared(Own):
        def annotate(self, model):
            super().annotate(model)
            (node,) = model.graph.find_nodes(op="call_function", target=LINEAR)
            annotation = node.meta["quantization_annotation"]
            annotation.output_qspec = SharedQuantizationSpec((node.args[0], node))
            return model

    prepared = pt2mx.prepare_pt2e(exported(), Shared(mx_qspec("mxfp8"), None, None))
    assert sum(isinstance(module, MXObserver) for module in prepared.modules()) == 1


def test_another_observer():
    prepared = pt2mx.prepare_pt2e(exported(), Own(mx_qspec("mxfp4", MXFormatObserver), None, None))
    assert sum(isinstance(module, MXFormatObserver) for module in prepared.modules()) == 1
    with pytest.raises(MXError, match="unknown ste 'clip'"):
        mx_qspec("mxfp4", ste="clip")
    with pytest.raises(MXError, match="unknown MX element format 'mxfp44'"):
        mx_qspec("mxfp44")
