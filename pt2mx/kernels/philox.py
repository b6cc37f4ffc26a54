"""The random numbers of stochastic rounding: Philox-4x32-10, in plain torch operations that Inductor can trace.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A value's number depends only on the seed
and its position in the tensor, so every kernel draws the same numbers, in any order.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def random_bits(seed: Tensor, shape: torch.Size) -> Tensor:
    """seed: () int64 -> a number in [0, 2**31) for each position of a tensor of that shape, int32.

    The i-th value in row-major order takes the upper 31 bits of word `i % 4` of the block whose counter is `i // 4`
    and whose key is the seed.
    """
    count = 1
    for size in shape:
        count = count * size
    position = torch.arange(count, device=seed.device, dtype=torch.int64)
    words = philox(position >> 2, seed)
    word = words[3]
    for lane in range(3):
        word = torch.where((position & 3) == lane, words[lane], word)
    return (word >> 1).to(torch.int32).reshape(shape)


def philox(counter: Tensor, seed: Tensor) -> list[Tensor]:
    """counter: (...) int64, seed: () int64 -> four words (...) int64 in [0, 2**32)."""
    c = [counter & _WORD, counter >> 32 & _WORD, torch.zeros_like(counter), torch.zeros_like(counter)]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = (_multiply(c[2 * i], _MULTIPLIERS[i]) for i in range(2))
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [key[i] + _KEY_STEPS[i] & _WORD for i in range(2)]
    return c


def _multiply(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return upper and lower 32 bits of the 64-bit product. It multiplies 16-bit halves of a, because int64 would
    overflow."""
    low = (a & 0xFFFF) * m
    high = (a >> 16) * m + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
