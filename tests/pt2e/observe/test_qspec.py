import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from pt2mx import MXObserver, MXSpec, parse
from pt2mx.pt2e.observe.qspec import mx_qspec, mx_spec, spec_of_qscheme, ste_of_qscheme


def test_round_trip():
    spec = MXSpec("fp6_e3m2", 16, 2, "rceil")
    qspec = mx_qspec(spec, MXObserver)
    assert isinstance(qspec, QuantizationSpec) and mx_spec(qspec) == spec


def test_identity_tells_specs_apart_that_torchao_compares_as_equal():
    base = MXSpec("fp4_e2m1", 32, 1)
    changes = (
        {"element": "fp6_e2m3"}, {"axis": 0}, {"block_size": 16}, {"scale_mode": "ceil"},
        {"scale_format": "e4m3"}, {"block_rows": 2},
    )  # fmt: skip
    for other in (base.replace(**change) for change in changes):
        assert mx_qspec(base, MXObserver).qscheme != mx_qspec(other, MXObserver).qscheme


def test_ste_is_part_of_the_identity():
    spec = MXSpec("fp4_e2m1", 32, 1)
    clipped = mx_qspec(spec, MXObserver, "clipped")
    assert clipped.qscheme != mx_qspec(spec, MXObserver).qscheme and mx_spec(clipped) == spec
    assert ste_of_qscheme(clipped.qscheme) == "clipped"
    assert ste_of_qscheme(mx_qspec(spec, MXObserver).qscheme) == "identity"


def test_scales_other_than_e8m0():
    for text in ("nvfp4", "nvfp4(four_six)", "fp8_e4m3{128x128}(f32)", "int4{row}(bf16)", "mxfp4{32x32}"):
        spec = parse(text)
        assert mx_spec(mx_qspec(spec, ste="clipped")) == spec


def test_tuples_of_earlier_versions_say_e8m0_scales():
    blocks = "mx", "fp4_e2m1", 16, 1, "floor", "even"
    for qscheme in (blocks, (*blocks, "identity")):
        assert spec_of_qscheme(qscheme) == MXSpec("fp4_e2m1", 16, 1) and ste_of_qscheme(qscheme) == "identity"


def test_other_annotations_have_no_mx_spec():
    assert mx_spec(QuantizationSpec(dtype=torch.int8, observer_or_fake_quant_ctr=MXObserver)) is None
    assert mx_spec(None) is None
