"""`rotate_quantize_and_store` on the CPU: RoPE, then `quantize_mx`."""

import pytest
import torch
from torch.library import opcheck

import pt2mx
from pt2mx import MXError
from pt2mx.ops.rope import rotate_quantize_and_store
from tests.compare import same
from tests.pt2mx.ops.test_rope import operands, rotated

#: the formats that a cache may have, and other modes, blocks and scales
FORMATS = (
    *("mxfp8", "mxfp8_e5m2", "mxint8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "fp4_e2m1{16}(e4m3)"),
    *("mxfp4{16}(rceil)", "mxfp6_e2m3{64}(even)", "mxfp8{8}(mse)", "int4{32}(bf16)", "mxint8{32}(ceil,half_away)"),
)


def of_codes(text, **sizes):
    """The arguments of a call over a cache in a format, and the rotated queries and the cache that it must give."""
    torch.manual_seed(0)
    spec = pt2mx.parse(text)
    query, key, value, keys, values, slots, cos, sin = operands(**sizes)
    key, value = ((x * 2.0 ** torch.randint(-9, 9, x.shape)).bfloat16() for x in (key, value))
    key[0, 0, 0, :5] = torch.tensor([float("inf"), 3, -0.0, 1e-40, float("nan")])
    key[1, 0, 0], value[0, 0, 0] = 0, -0.0
    cache = [tensor for x in (keys, values) for tensor in reversed(pt2mx.quantize_mx(x, spec))]
    new = [tensor for x in (rotated(key, cos, sin), value) for tensor in reversed(pt2mx.quantize_mx(x, spec))]
    want = [tensor.clone() for tensor in cache]
    for tensor, rows in zip(want, new, strict=True):
        tensor[:, :, slots] = rows
    scale_format = None if spec.scale_format.name == "e8m0" else spec.scale_format.name
    modes = spec.element.name, spec.block_size, spec.scale_mode, spec.rounding, scale_format
    return [query, key, value, *cache, slots, cos, sin, *modes], [rotated(query, cos, sin), *want]


@pytest.mark.parametrize("sizes", [{}, {"length": 3, "heads": 2, "key_heads": 1, "value_width": 64}, {"width": 24}])
@pytest.mark.parametrize("text", FORMATS)
def test_values(text, sizes):
    args, want = of_codes(text, **sizes)
    assert all(map(same, [rotate_quantize_and_store(*args), *args[3:7]], want))


@pytest.mark.parametrize("text", ["mxfp6_e3m2", "fp4_e2m1{16}(e4m3)"])
def test_schema(text):
    opcheck(rotate_quantize_and_store, of_codes(text)[0])


@pytest.mark.compiled
def test_compiled_code_writes_the_cache_in_place():
    args, (query, *cache) = of_codes("mxfp4")
    compiled = torch.compile(lambda x, *rest: rotate_quantize_and_store(x + 0, *rest), fullgraph=True)
    addresses = [tensor.data_ptr() for tensor in args[3:7]]
    assert torch.equal(compiled(*args), query) and addresses == [tensor.data_ptr() for tensor in args[3:7]]
    assert all(map(torch.equal, args[3:7], cache))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, torch.Tensor.float, r"must be bfloat16 of 4 dimensions, not \(2, 4, 1, 16\) torch.float32"),
        (2, lambda value: value[:, :1], r"value \(2, 1, 1, 16\) do not fit each other"),
        (3, lambda data: data[:, :1], r"codes of \(2, 1, 6, 8\) do not fit new rows of \(2, 2, 1, 16\)"),
        (5, lambda data: data[:, :, 1:], r"codes of \(2, 2, 5, 8\) do not fit new rows of \(2, 2, 1, 16\)"),
        (3, lambda data: data[..., :4], "data has 4 bytes along dimension 3, but 16 codes of fp4_e2m1 take 8"),
        (6, lambda scale: scale.int(), "codes and scales are uint8, not torch.uint8 and torch.int32"),
        (4, lambda scale: scale[:, :, 1:], r"scale of shape \(2, 2, 5, 1\) does not fit data of shape \(2, 2, 6, 8\)"),
        (7, torch.Tensor.int, r"slots must be \(1,\) torch.int64, not \(1,\) torch.int32"),
        (7, lambda slots: slots.to("meta"), "all tensors must be on one device, not on cpu and meta"),
        (8, lambda cos: cos[..., :8], r"cos and sin must broadcast to \(2, 1, 1, 16\), not \(2, 1, 1, 8\)"),
        (13, lambda rounding: "stochastic", "values are not rounded 'stochastic' where they are stored"),
        (14, lambda scale: "e4m3_f32", "has a tensor scale, which new tokens would change"),
    ],
)
def test_bad_input(index, change, message):
    args, _ = of_codes("mxfp4")
    args[index] = change(args[index])
    if index == 14:
        args[12] = "nearest"
    with pytest.raises(MXError, match=message):
        rotate_quantize_and_store(*args)
