import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from pt2mx import MXObserver, MXSpec
from pt2mx.pt2e.qspec import mx_qspec, mx_spec, ste_of_qscheme


def test_round_trip():
    spec = MXSpec("fp6_e3m2", 16, 2, "rceil")
    qspec = mx_qspec(spec, MXObserver)
    assert isinstance(qspec, QuantizationSpec) and mx_spec(qspec) == spec


def test_identity_tells_specs_apart_that_torchao_compares_as_equal():
    base = MXSpec("fp4_e2m1", 32, 1)
    changes = ({"element": "fp6_e2m3"}, {"axis": 0}, {"block_size": 16}, {"scale_mode": "ceil"})
    for other in (base.replace(**change) for change in changes):
        assert mx_qspec(base, MXObserver).qscheme != mx_qspec(other, MXObserver).qscheme


def test_ste_is_part_of_the_identity():
    spec = MXSpec("fp4_e2m1", 32, 1)
    clipped = mx_qspec(spec, MXObserver, "clipped")
    assert clipped.qscheme != mx_qspec(spec, MXObserver).qscheme and mx_spec(clipped) == spec
    assert ste_of_qscheme(clipped.qscheme) == "clipped"
    assert ste_of_qscheme(mx_qspec(spec, MXObserver).qscheme) == "identity"


def test_other_annotations_have_no_mx_spec():
    assert mx_spec(QuantizationSpec(dtype=torch.int8, observer_or_fake_quant_ctr=MXObserver)) is None
    assert mx_spec(None) is None
