from math import prod

import pytest
import torch

import pt2mx
from pt2mx import MXSpec
from pt2mx.pt2e.flow.packed_weights import packed_bytes, storage_note

SHORT = "each with a scale and whole bytes of its own"
SHAPES = ((64, 64), (32, 1, 3, 3), (8, 3, 7, 7), (16, 40), (5, 33), (4, 0))


@pytest.mark.parametrize(
    "element", ["fp4", "fp6_e3m2", "fp8", "int8", "fp5_e2m2", *(f"int{bits}" for bits in range(2, 8))]
)
@pytest.mark.parametrize("block_size", [16, 32])
def test_bytes_are_those_of_codes_and_scales_and_more_than_the_format_has_is_said(element, block_size):
    for shape in SHAPES:
        spec = MXSpec(element, block_size, 1)
        scales, codes = pt2mx.quantize_mx(torch.ones(shape), spec)
        size = codes.numel() + scales.numel()
        assert packed_bytes(shape, spec) == size
        note, bits = storage_note(shape, spec), 8 * size / max(prod(shape), 1)
        assert (note is not None) == (bool(prod(shape)) and _is_more(bits, spec)), (shape, bits)
        if note is not None:
            assert note.startswith(f"{bits:.4g} bits a value: ")
            assert ("take 8" in note) == (spec.element.bits not in (4, 6, 8))


def _is_more(bits, spec):
    unpacked = spec.element.bits not in (4, 6, 8)
    return unpacked or bits >= 1.25 * spec.effective_bits


@pytest.mark.parametrize(
    "shape, element, note",
    [
        ((32, 1, 3, 3), "fp4", f"16 bits a value: blocks of only 1 value, {SHORT}"),
        ((8, 3, 7, 7), "fp6_e2m3", f"10.67 bits a value: blocks of only 3 values, {SHORT}"),
        ((8, 64), "int3", "8.25 bits a value: codes of 3 bits take 8"),
        ((32, 1, 3, 3), "int5", f"16 bits a value: codes of 5 bits take 8, blocks of only 1 value, {SHORT}"),
        ((8, 64), "int9", "16.25 bits a value: codes of 9 bits take 16"),
        ((8, 40), "fp4", None),
        ((8, 64), "nvfp4", None),
        ((8, 64), "fp8_e4m3{8x64}(f32)", None),
        ((32, 1, 3, 3), "nvfp4", f"16.11 bits a value: blocks of only 1 value, {SHORT}"),
    ],
)  # fmt: skip
def test_the_reasons(shape, element, note):
    assert storage_note(shape, pt2mx.parse(element, axis=1)) == note
