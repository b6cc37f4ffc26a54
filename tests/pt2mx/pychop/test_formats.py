import pytest

from pt2mx import ELEMENTS, MXError, pychop
from pt2mx.pychop import MX_FORMATS, MXSpec, create_mx_spec

# element bits, bits a block, compression against 16 and 32 bits: what pychop gives, in its order
TABLE = {
    "mxfp8_e5m2": ("MXFP8_E5M2", 8, 264, 1.9393939393939394, 3.878787878787879),
    "mxfp8_e4m3": ("MXFP8_E4M3", 8, 264, 1.9393939393939394, 3.878787878787879),
    "mxfp6_e3m2": ("MXFP6_E3M2", 6, 200, 2.56, 5.12),
    "mxfp6_e2m3": ("MXFP6_E2M3", 6, 200, 2.56, 5.12),
    "mxfp4_e2m1": ("MXFP4_E2M1", 4, 136, 3.764705882352941, 7.529411764705882),
    "mxint8": ("MXINT8", 8, 264, 1.9393939393939394, 3.878787878787879),
}


@pytest.mark.parametrize("name", TABLE)
def test_fields_of_the_formats(name):
    spec = MX_FORMATS[name]
    sizes = (spec.element_bits, spec.total_bits_per_block, spec.compression_vs_fp16, spec.compression_vs_fp32)
    assert (spec.name, *sizes) == TABLE[name]
    assert spec.exp_bits + spec.sig_bits == spec.element_bits - 1 and (spec.scale_exp_bits, spec.scale_sig_bits) == (
        8,
        0,
    )


def test_the_order_is_that_of_pychop():
    assert list(MX_FORMATS) == list(TABLE)
    comparison = pychop.compare_mx_formats([1.0, 2.4])
    assert [row.format for row in comparison.rows] == [str(spec.to_core()) for spec in MX_FORMATS.values()]


def test_the_widest_custom_format():
    spec = create_mx_spec(5, 10)
    assert repr(spec) == "MXSpec(name='CUSTOM_MX16_E5M10', E5M10, block_size=32)"
    assert (spec.element_bits, spec.total_bits_per_block) == (16, 520)
    assert (spec.compression_vs_fp16, spec.compression_vs_fp32) == (0.9846153846153847, 1.9692307692307693)
    assert create_mx_spec(5, 10, 16, 4, "HALF") == MXSpec("HALF", 5, 10, 16, 4, 0)


@pytest.mark.parametrize(
    ("spec", "element"),
    [
        (MX_FORMATS["mxfp8_e5m2"], "fp8_e5m2"),
        (MXSpec("mxfp8_e4m3", 4, 3), "fp8_e4m3"),
        (create_mx_spec(4, 3), "fp8_e4m3_finite"),
        (create_mx_spec(5, 2), "fp8_e5m2_finite"),
        (create_mx_spec(2, 1), "fp4_e2m1"),
        (create_mx_spec(0, 7), "int8_full"),
        (create_mx_spec(0, 15), "int16_full"),
        (create_mx_spec(5, 10), "fp16_e5m10"),
    ],
)
def test_the_name_decides_on_special_values(spec, element):
    assert spec.to_core().element is ELEMENTS[element]
    assert spec.to_core().block_size == spec.block_size == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((8, 7), "at most 16 bits"),
        ((5, 11), "at most 16 bits"),
        (("a", 2), "unknown MX element format"),
        ((3, 2, 0), "block_size=0"),
        ((3, 2, 32, 12), "scale_exp_bits=12"),
    ],
)
def test_widths_that_nothing_has(fields, message):
    with pytest.raises(MXError, match=message):
        pychop.create_mx_spec(*fields)
