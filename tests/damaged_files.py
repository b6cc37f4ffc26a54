"""Files with damaged headers: bytes and numbers that another program, a disk or an attacker changed."""

import random
import re
from collections.abc import Iterator


def damaged(content: bytes, begin: int, end: int, count: int) -> Iterator[bytes]:
    """Yield copies of a file with a change between two positions: a byte, a bit, a number of JSON, or a cut or doubled
    part. The same copies each time."""
    generator = random.Random(0)
    numbers = [match.span() for match in re.finditer(rb"\d+", content[begin:end])]
    for _ in range(count):
        at = generator.randrange(begin, end)
        to = min(end, at + generator.choice((1, 2, 8)))
        change = generator.choice((_byte, _bit, _cut, _double, *(2 * [_number] if numbers else [])))
        if change is _number:
            at, to = (begin + place for place in generator.choice(numbers))
        yield content[:at] + change(content[at:to], generator) + content[to:]


def _byte(part: bytes, generator: random.Random) -> bytes:
    return bytes([generator.randrange(256)]) + part[1:]


def _bit(part: bytes, generator: random.Random) -> bytes:
    return bytes([part[0] ^ 1 << generator.randrange(8)]) + part[1:]


def _cut(part: bytes, generator: random.Random) -> bytes:
    return b""


def _double(part: bytes, generator: random.Random) -> bytes:
    return part + part


def _number(part: bytes, generator: random.Random) -> bytes:
    number = int(part)
    others = (0, -1, -number, number + 1, number // 2, 2 * number, 1 << 40, 1 << 64, 10**30, 0.5, 1e300)
    others = (*map(str, others), f"{number}.0", "null", '"1"', "true", "[]", "{}", "NaN", "[" * 100_000)
    return generator.choice(others).encode()
