import pytest
import torch

from mx_conformance.exact import philox as exact_philox
from mx_conformance.exact import random_number
from pt2mx import ops
from pt2mx.kernels.reference import philox, random_bits

# Random123's known answers of Philox-4x32-10: counter, key, words
ZEROS = ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
ONES = ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD])


@pytest.mark.parametrize(("counter", "key", "words"), [ZEROS, ONES])
def test_the_oracle_gives_the_published_answers(counter, key, words):
    assert exact_philox(counter, key) == words


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 7, 2**63 - 1])
def test_words_equal_the_oracle(seed):
    counter = torch.tensor([0, 1, 2**31, 2**32 + 3, 2**40])
    got = torch.stack(philox(counter, torch.tensor(seed)))
    for i, place in enumerate(counter.tolist()):
        want = exact_philox([place & 0xFFFFFFFF, place >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
        assert got[:, i].tolist() == want


def test_a_place_has_one_number_in_every_shape():
    seed = torch.tensor(9)
    bits = random_bits(seed, torch.Size([5, 7]))
    assert bits.dtype == torch.int32
    assert bits.flatten().tolist() == [int(random_number(i, 9) * 2**31) for i in range(35)]
    assert torch.equal(random_bits(seed, torch.Size([35])), bits.flatten())
    assert torch.equal(ops.random_bits(seed, [5, 7]), bits)


def test_opcheck():
    torch.library.opcheck(ops.random_bits, (torch.tensor(3), [4, 5]))
