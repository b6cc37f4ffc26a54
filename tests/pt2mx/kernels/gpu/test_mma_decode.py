"""The PTX that decodes weights, run instruction by instruction in Python."""

import pytest
import torch

from pt2mx import ELEMENTS
from pt2mx.kernels.elements import decode
from pt2mx.kernels.gpu.mma_decode import decode_eight_ptx, decode_ptx
from pt2mx.kernels.gpu.mma_layout import CONVERTED, FRAGMENTS, gather_bits


def test_ptx_masks_each_pair_in_place():
    text = decode_ptx(ELEMENTS["fp4_e2m1"])
    assert text.count("and.b32") == 16 and text.count("lop3.b32") == 2 * 2 * 2  # of 16 pairs four are of three pieces


_INTEGER_INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
}


def run_integers(text, registers):
    """Run the integer instructions of a text in `registers`; yield the other ones: name, target, operands."""
    for line in text.strip("{}\n").split(";"):
        instruction, _, rest = line.strip().partition(" ")
        target, *operands = rest.split(", ")
        if instruction in _INTEGER_INSTRUCTIONS:
            values = [registers[o] if o in registers else int(o, 0) for o in operands]
            registers[target] = _INTEGER_INSTRUCTIONS[instruction](*values)
        else:
            yield instruction, target, operands


@pytest.mark.parametrize("scales_of_word", [1, 2])
@pytest.mark.parametrize("name", [name for name, fragment in FRAGMENTS.items() if fragment.pairs])
def test_ptx_gathers_the_pairs_that_the_definition_does(name, scales_of_word):
    """Run instruction by instruction; the scale of each pair is its own."""
    fragment = FRAGMENTS[name]
    outputs, words = fragment.values // 2, torch.randint(-(2**31), 2**31, (1, fragment.words), dtype=torch.int64)
    registers = {f"${outputs + i}": int(word) & 0xFFFFFFFF for i, word in enumerate(words[0])}
    pairs = {}
    for instruction, target, operands in run_integers(decode_ptx(ELEMENTS[name], scales_of_word), registers):
        if instruction == "fma.rn.bf16x2":
            pairs[target] = registers[operands[0]]
            scale = int(operands[1].removeprefix("$")) - outputs - fragment.words
            assert scale == 4 * ((len(pairs) - 1) * fragment.scales * scales_of_word // outputs)
    halves = gather_bits(words.to(torch.int32), fragment).view(-1, 2).to(torch.int64) & 0xFFFF
    assert [pairs[f"${i}"] for i in range(outputs)] == (halves[:, 0] | halves[:, 1] << 16).tolist()


@pytest.mark.parametrize("name", CONVERTED)
def test_bytes_are_converted_by_instructions(name):
    text = decode_ptx(ELEMENTS[name])
    assert "and.b32" not in text and text.count("fma.rn.bf16x2 $") == FRAGMENTS[name].values // 2


def _floats(word):
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16).float()


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3"])
def test_ptx_decodes_eight_codes(name):
    """Run instruction by instruction, for each code: pair i has code i of the low halves, and code i of the high."""
    element = ELEMENTS[name]
    of_word = 16 // element.bits
    for code in range(1 << element.bits):
        pairs = [(code, (code + i) % (1 << element.bits)) for i in range(4)]
        registers = {}
        for at in range(0, 4, of_word):
            halves = [sum(pairs[at + i][h] << element.bits * i for i in range(of_word)) for h in range(2)]
            registers[f"${4 + at // of_word}"] = halves[0] | halves[1] << 16
        decoded = {}
        for instruction, target, operands in run_integers(decode_eight_ptx(element), registers):
            if instruction == "fma.rn.bf16x2":
                product = _floats(registers[operands[0]]) * _floats(registers[operands[1]]) + _floats(
                    registers[operands[2]]
                )
            elif instruction == "mov.b32" and target.startswith("$"):
                decoded[target] = product.tolist()
            elif instruction == "mov.b32":
                registers[target] = int(operands[0], 0)
        codes = torch.tensor(pairs, dtype=torch.int32)
        assert [decoded[f"${i}"] for i in range(4)] == decode(codes, element).tolist()
