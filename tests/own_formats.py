"""Elements that tests register, and forget."""

from collections.abc import Iterator
from contextlib import contextmanager

from pt2mx import register_element
from pt2mx.formats import ELEMENTS, REGISTERED
from pt2mx.modes import FLOAT_SCALE_MODES, SCALE_MODES

#: the values of QLoRA's NF4 (Dettmers et al., arXiv:2305.14314, appendix E)
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
#: name -> the arguments of `register_element`
OWN = {
    "own_e4m3": {"exponent_bits": 4, "mantissa_bits": 3, "bias": 11, "max_normal": 28.0, "has_nan": True},
    "own_e5m2": {"exponent_bits": 5, "mantissa_bits": 2, "has_inf": True, "has_nan": True},
    "own_e2m1": {"exponent_bits": 2, "mantissa_bits": 1, "bias": 3},
    "own_int6": {"mantissa_bits": 5, "max_normal": 1.5},
    "own_int12": {"mantissa_bits": 11, "full_range": True},
    "own_nf4": {"values": NF4},
    "own_int4": {"values": [code / 4 - 4 * (code > 7) for code in range(16)]},
    "own_ternary": {"values": [0, 2.0, -0.5]},
    "own_large": {"values": [2.0**-20, 3.0, -(2.0**40), 2.0**40, 0, -3.0000002, 3.0000002, 2.0**-19]},
}


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget at the end what is registered meanwhile."""
    tables = ELEMENTS, REGISTERED, SCALE_MODES, FLOAT_SCALE_MODES
    kept = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, kept, strict=True):
        table.clear()
        table.update(rows)


@contextmanager
def registered() -> Iterator[None]:
    """Register the elements of `OWN`."""
    with forgotten():
        for name, arguments in OWN.items():
            register_element(name, **arguments)
        yield
