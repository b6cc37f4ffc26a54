"""Split one axis of a tensor into groups, and pack codes along it into bytes, in plain torch operations.

Design: numerics, storage. 4-bit codes two a byte, low nibble first; 6-bit codes four in three little-endian bytes;
other codes of up to 8 bits one a byte, wider ones one in two little-endian bytes.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: whether traced code is guarded: torch.compile checks the sizes that it relies on before it runs
_has_guards: ContextVar[bool] = ContextVar("has_guards", default=False)
#: bits of a packed code -> (codes, bytes) of the smallest group that fills whole bytes
_GROUPS = {bits: (8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)) for bits in (4, 6)}


@contextmanager
def guards(kept: bool) -> Iterator[None]:
    """Tell `group_count` whether code traced in this context is guarded."""
    token = _has_guards.set(kept)
    try:
        yield
    finally:
        _has_guards.reset(token)


def group_count(length: int, size: int) -> int:
    """Return the number of groups of `size` for `length` values; for a symbolic length maybe one more.

    Tracing asks whether a size is 1, and whether padding changes the length. Without guards (AOTInductor, torch.export)
    the answers for the example inputs would become fixed for all inputs; with one extra group, both answers are always
    no. With guards, a single group gets its own code, which needs no index.
    """
    count = -(-length // size)
    if isinstance(length, int):
        return count
    if not _has_guards.get():
        return count + 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # a slow import that eager calls do not need

    return 1 if guard_or_false(length <= size) else count


def is_one_in_the_example(size: int) -> bool:
    """Return whether tracing without guards would fix a symbolic size to 1: some operators ask whether sizes of a dense
    tensor are 1."""
    if isinstance(size, int) or _has_guards.get():
        return False
    return size.node.has_hint() and size.node.hint == 1


def _note(fact: bool | torch.SymBool) -> None:
    """Tell torch's shape environment a fact about symbolic sizes that follows from how groups are counted.

    torch asks for it (is the padding negative, is a slice too long) and cannot prove it: an exported program would
    check it as a guard at each call.
    """
    if isinstance(fact, torch.SymBool) and not _has_guards.get():
        env = fact.node.shape_env
        env.axioms.update(env.get_implications(env.simplify(fact.node.expr)))


def pad_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """Append zeros to `x` along `axis` (non-negative), up to `group_count` groups; (..., n, ...) any dtype."""
    length = x.shape[axis]
    if isinstance(length, int) and length % size == 0:
        return x
    padded = group_count(length, size) * size
    _note(length <= padded)
    # for a symbolic length without a branch
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, padded - length))


def split_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """(..., n, ...) -> (..., group_count, size, ...), padded with zeros."""
    return pad_axis(x, axis, size).unflatten(axis, (group_count(x.shape[axis], size), size))


def size_of_group(size: int, length: int) -> int:
    """Return the size of the groups of `length` values; a single short one needs no padding."""
    return max(1, min(size, length)) if isinstance(length, int) else size


def has_length(x: Tensor, axis: int, length: int) -> bool:
    """True if x is known to have `length` values along `axis`; of symbolic sizes that is not asked."""
    return isinstance(length, int) and isinstance(x.shape[axis], int) and x.shape[axis] == length


def trim_axis(x: Tensor, axis: int, length: int) -> Tensor:
    """Return the first `length` values along `axis`; x itself if it has no more."""
    if has_length(x, axis, length):
        return x
    _note(length <= x.shape[axis])
    return x.narrow(axis, 0, length)


def resized(x: Tensor, axis: int, size: int) -> list[int]:
    """Return x's shape with another size along `axis`."""
    return [*x.shape[:axis], size, *x.shape[axis + 1 :]]


def new_size(size: int, length: int) -> int:
    """Return `size`, a quotient of the symbolic `length`, in an exported graph as a size of its own.

    Tracing asks of every size whether it is 1. Of a quotient that is a guard on `length` ("at most one block"):
    exporting with a dynamic length would fail, and torch.compile would compile twice. Of a length that the data decide
    nothing is asked, and a decomposition could not give a size of its own again. Where torch.compile may break a graph,
    it breaks at such a size, and fails in a subgraph: there compiling twice is less.
    """
    if isinstance(length, int) or _is_decided_by_data(length):
        return size
    if not length.node.shape_env.allow_dynamic_output_shape_ops:
        return size
    return torch.library.get_ctx().new_dynamic_size()


def _is_decided_by_data(length: torch.SymInt) -> bool:
    """True if `nonzero`, `item` and the like gave a length. Dynamo has a symbol with a value for `item`; later traces
    of the same graph do not."""
    from torch._dynamo.source import CallMethodItemSource  # a symbolic length means that dynamo is there

    sources = length.node.shape_env.var_to_sources
    by_item = (isinstance(s, CallMethodItemSource) for x in length.node.expr.free_symbols for s in sources.get(x, ()))
    return not length.node.has_hint() or any(by_item)


def is_packed(bits: int) -> bool:
    """Return whether codes of `bits` bits share bytes, so that the number of bytes does not determine the number of
    codes."""
    return bits in _GROUPS


def group_of(bits: int) -> tuple[int, int]:
    """Return codes and bytes of one packed group; a code that is not packed is a group."""
    return _GROUPS.get(bits, (1, -(-bits // 8)))


def packed_length(length: int, bits: int) -> int:
    """Return the bytes that `length` codes of `bits` bits take along the packed axis."""
    codes, size = group_of(bits)
    return -(-length // codes) * size


def unpacked_length(size: int, bits: int) -> int:
    """Return the codes that `size` bytes hold, including the padding of the last group."""
    codes, group = group_of(bits)
    return size // group * codes


def pack(codes: Tensor, axis: int, bits: int) -> Tensor:
    """codes: (..., n, ...) int32 in [0, 2**bits) -> (..., packed_length(n), ...) uint8.

    A single short group is not padded: where Inductor computes one code a row in the same kernel, its Triton code drops
    the mask that fills the padding, so that the padding is a copy of the code (pytorch/pytorch#189895).
    """
    per_group, size = group_of(bits)
    if size == per_group:
        return codes.to(torch.uint8)
    codes = codes.to(_word_of(size))
    per_group = size_of_group(per_group, codes.shape[axis])
    groups = split_axis(codes, axis, per_group)  # (..., groups, codes, ...)
    word = groups.select(axis + 1, 0)
    for i in range(1, per_group):
        word = word | groups.select(axis + 1, i) << (bits * i)
    shifts = _along(axis, codes, 8 * torch.arange(size, device=codes.device, dtype=torch.int32))
    data = (word.unsqueeze(axis + 1) >> shifts & 0xFF).to(torch.uint8).flatten(axis, axis + 1)
    return trim_axis(data, axis, packed_length(codes.shape[axis], bits))


def unpack(data: Tensor, axis: int, bits: int) -> Tensor:
    """data: (..., bytes, ...) uint8 -> (..., unpacked_length(bytes), ...) int32 codes; for a symbolic number of bytes
    with the padding of `group_count`."""
    per_group, size = group_of(bits)
    if size == per_group:
        return data.to(torch.int32) & ((1 << bits) - 1)
    data = data.to(_word_of(size))
    groups = split_axis(data, axis, size)  # (..., groups, bytes, ...)
    word = groups.select(axis + 1, 0)
    for i in range(1, size):
        word = word | groups.select(axis + 1, i) << (8 * i)
    shifts = _along(axis, data, bits * torch.arange(per_group, device=data.device, dtype=torch.int32))
    return (word.unsqueeze(axis + 1) >> shifts & ((1 << bits) - 1)).to(torch.int32).flatten(axis, axis + 1)


def _word_of(size: int) -> torch.dtype:
    """Return an integer dtype that holds a group of `size` bytes."""
    return torch.int32 if size <= 4 else torch.int64


def _along(axis: int, x: Tensor, vector: Tensor) -> Tensor:
    """Reshape `vector` to broadcast along a new dimension at `axis + 1` of `x`."""
    return vector.reshape((-1,) + (1,) * (x.dim() - 1 - axis))
