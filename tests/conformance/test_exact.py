"""Values by hand; `tests/pt2mx/kernels/test_reference.py` compares the rest with the kernels."""

import math

import pytest

from mx_conformance.conventions import CHOICES
from mx_conformance.exact import ROUNDINGS, code_values, quantize_block
from pt2mx import ELEMENTS, modes


def test_values_of_codes():
    fp4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert code_values(ELEMENTS["fp4_e2m1"]) == (*fp4, *(-v for v in fp4))
    assert math.copysign(1, code_values(ELEMENTS["fp4_e2m1"])[8]) == -1
    int8 = code_values(ELEMENTS["int8"])
    assert (int8[1], int8[127], int8[128], int8[255]) == (1 / 64, 127 / 64, -2.0, -1 / 64)
    e5m2, e4m3 = code_values(ELEMENTS["fp8_e5m2"]), code_values(ELEMENTS["fp8_e4m3"])
    assert e5m2[0x7B] == 57344 and e5m2[0x7C] == math.inf and e5m2[0xFC] == -math.inf
    assert all(math.isnan(e5m2[code]) for code in (0x7D, 0x7E, 0x7F, 0xFD, 0xFF))
    assert e4m3[0x7E] == 448 and math.isnan(e4m3[0x7F]) and math.isnan(e4m3[0xFF]) and len(e4m3) == 256


@pytest.mark.parametrize(
    ("mode", "amax", "scale"),
    [
        ("even_m0", 5.9, 127),
        ("even_m0", 6.0, 128),
        ("even", 6.9, 127),
        ("even_m1", 7.0, 128),
        ("even_m2", 7.4, 127),
        ("even_m2", 7.5, 128),
        ("even_m3", 7.75, 128),
    ],
)
def test_even_of_other_mantissas(mode, amax, scale):
    assert quantize_block([amax, 1.0], ELEMENTS["fp4_e2m1"], mode)[0] == scale


def test_every_convention_of_pt2mx_is_known():
    assert list(ROUNDINGS) == [name for name, rounding in modes.ROUNDINGS.items() if not rounding.random]
    known = CHOICES["scale_mode"].allowed(ELEMENTS["fp4_e2m1"])
    assert {name for name, mode in modes.SCALE_MODES.items() if not mode.searches} == {
        name for name in known if not name.startswith("even_m")
    }
