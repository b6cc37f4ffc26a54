"""`rotate_and_store` on the CPU, where it is what its definition says."""

import pytest
import torch
from torch.library import opcheck

from pt2mx import MXError
from pt2mx.ops.rope import rotate_and_store


def operands(heads=4, key_heads=2, length=1, slots=6, width=16, value_width=16):
    """The arguments of a call, with factors of sequences of their own."""
    sizes = (heads, length, width), (key_heads, length, width), (key_heads, length, value_width)
    news = [torch.randn(2, *size).bfloat16() for size in sizes]
    caches = [torch.randn(2, key_heads, slots, n).bfloat16() for n in (width, value_width)]
    angles = torch.randn(2, 1, length, width)
    return [*news, *caches, torch.arange(length) + 2, angles.cos().bfloat16(), angles.sin().bfloat16()]


def rotated(x, cos, sin):
    """Rotate as transformers' `apply_rotary_pos_emb`, in float32."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1).float()
    return (x.float() * cos.float() + turned * sin.float()).bfloat16()


@pytest.mark.parametrize("sizes", [{}, {"length": 3}, {"key_heads": 4, "value_width": 8}, {"heads": 2, "key_heads": 1}])
def test_values(sizes):
    args = operands(**sizes)
    query, key, value, keys, values, slots, cos, sin = args
    want = keys.clone(), values.clone()
    want[0][:, :, slots], want[1][:, :, slots] = rotated(key, cos, sin), value
    assert torch.equal(rotate_and_store(*args), rotated(query, cos, sin))
    assert torch.equal(keys, want[0]) and torch.equal(values, want[1])
    opcheck(rotate_and_store, args)


def test_compiled_code_writes_the_cache_in_place():
    args = operands()
    want = [arg.clone() for arg in args]
    y = rotate_and_store(*want)
    compiled = torch.compile(lambda *args: rotate_and_store(*(arg + 0 for arg in args[:3]), *args[3:]), fullgraph=True)
    address = args[3].data_ptr()
    assert torch.equal(compiled(*args), y) and args[3].data_ptr() == address
    assert all(map(torch.equal, args, want))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, torch.Tensor.float, r"must be bfloat16 of 4 dimensions, not \(2, 4, 1, 16\) torch.float32"),
        (1, lambda key: key[:, :1], r"key \(2, 1, 1, 16\), .* do not fit each other"),
        (4, lambda values: values[:, :, 1:], r"keys of \(2, 2, 6, 16\) and values of \(2, 2, 5, 16\) do not fit"),
        (5, torch.Tensor.int, r"slots must be \(1,\) torch.int64, not \(1,\) torch.int32"),
        (5, lambda slots: slots.to("meta"), "all tensors must be on one device, not on cpu and meta"),
        (6, lambda cos: cos[..., :8], r"cos and sin must broadcast to \(2, 1, 1, 16\), not \(2, 1, 1, 8\)"),
    ],
)
def test_bad_input(index, change, message):
    args = operands()
    args[index] = change(args[index])
    with pytest.raises(MXError, match=message):
        rotate_and_store(*args)
