"""The operator store_mx: formats, slots, strides, compilation, errors."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from pt2mx import MXError
from pt2mx.ops.cache import store_mx
from pt2mx.ops.quantization import quantize_mx
from tests.threads import on_threads

MODES = "fp8_e4m3", 32, "floor", "even"


def made(dtype=torch.float32, modes=MODES, length=3, slots=7):
    """New keys of 64 and values of 96 numbers, an empty cache, and the slots."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, 3, length, 64, generator=generator).to(dtype)
    value = torch.randn(2, length, 3, 96, generator=generator).to(dtype).transpose(1, 2)
    cache = []
    for width in (64, 96):
        scale, codes = quantize_mx(torch.randn(2, 3, slots, width, generator=generator), *modes[:2], -1, *modes[2:])
        cache += [codes, scale]
    return key, value, cache, torch.tensor([5, 0, 2])[:length]


def written(key, value, cache, slots, modes=MODES):
    """The cache as quantize_mx and index_copy_ leave it."""
    cache = [tensor.clone() for tensor in cache]
    for x, (codes, scale) in ((key, cache[:2]), (value, cache[2:])):
        new_scale, new = quantize_mx(x, *modes[:2], -1, *modes[2:])
        codes.index_copy_(2, slots, new)
        scale.index_copy_(2, slots, new_scale)
    return cache


def store(key, value, cache, slots, modes=MODES):
    store_mx(key, value, *cache, slots, *modes)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8", "fp6_e2m3", "fp4_e2m1"])
@pytest.mark.parametrize("length", [1, 3])
def test_it_is_quantize_and_index_copy(dtype, name, length):
    modes = name, 32, "ceil", "half_away"
    key, value, cache, slots = made(dtype, modes, length)
    want = written(key, value, cache, slots, modes)
    assert not all(map(torch.equal, cache, want))
    assert all(map(torch.equal, store(key, value, cache, slots, modes), want))
    want = written(-key, value, cache, slots + 1, modes)  # a repeated call with other slots
    assert all(map(torch.equal, store(-key, value, cache, slots + 1, modes), want))


def test_caches_of_other_strides():
    key, value, cache, slots = made(slots=14)
    strided = [tensor[:, :, ::2] for tensor in cache]
    want = written(key, value, strided, slots)
    assert all(map(torch.equal, store(key, value, strided, slots), want))


def test_many_tokens_on_two_threads():
    key, value, cache, _ = made()
    slots = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    key, value = (x[:, :, :1].expand(-1, -1, 600, -1) * torch.arange(600)[:, None] for x in (key, value))
    cache = [tensor.new_zeros(2, 3, 600, tensor.shape[3]) for tensor in cache]
    (got,) = on_threads(lambda: store(key, value, cache, slots), 2)
    assert all(map(torch.equal, got, written(key, value, cache, slots)))


@pytest.mark.compiled
def test_compiled_it_is_quantize_and_index_copy():
    key, value, cache, slots = made()
    want = written(2 * key, value, cache, slots)

    def step(key, value, slots, *cache):
        store_mx(2 * key, value, *cache, slots, *MODES)
        return cache[0] + 0

    traced = []

    def backend(graph, inputs):
        traced.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    got = compiled(key, value, slots, *cache)
    assert all(map(torch.equal, cache, want)) and torch.equal(got, want[0])
    assert torch.ops.pt2mx.quantize_mx.default in traced and store_mx not in traced


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v, c, s: (k[0], v, c, s), r"\(3, 3, 64\) torch.float32 cannot be stored in a cache"),
        (lambda k, v, c, s: (k, v.half(), c, s), "torch.float16 cannot be stored"),
        (lambda k, v, c, s: (k, v, [c[2], *c[1:]], s), "data has 96 bytes"),
        (lambda k, v, c, s: (k, v, c, s.int()), r"slots of \(3,\) torch.int32"),
        (lambda k, v, c, s: (k, v, c, s[:2]), r"do not fit 3 keys and 3 values"),
        (lambda k, v, c, s: (k, v[:, :, :2], c, s), r"do not fit 3 keys and 2 values"),
        (lambda k, v, c, s: (k, v, c, s.to("meta")), "one device, not on cpu and meta"),
        (lambda k, v, c, s: (k, v.to("meta"), [*c[:2], *(t.to("meta") for t in c[2:])], s), "not on cpu and meta"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(MXError, match=message):
        store(*change(*made()))


@pytest.mark.parametrize("strided", [False, True])
def test_slots_that_do_not_exist(strided):
    key, value, cache, slots = made(slots=14 if strided else 7)
    cache = [tensor[:, :, ::2] for tensor in cache] if strided else cache
    store(key, value, cache, slots)  # a repeated call reads them, too
    for bad, index in ((slots + 2, 7), (slots - 1, -1), (slots + 2**62, 2**62 + 5)):
        with pytest.raises(MXError, match=f"index {index} is out of bounds .*: pass slots of at least 0 and below 7"):
            store(key, value, cache, bad)


@pytest.mark.parametrize("repeated", [False, True])
def test_tracing_records_the_writes(repeated):
    key, value, cache, slots = made()
    want = written(key, value, cache, slots)
    if repeated:
        store(key, value, [tensor.clone() for tensor in cache], slots)
    traced = make_fx(lambda *args: store(args[0], args[1], args[2:6], args[6])[0] + 0)(key, value, *cache, slots)
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.aten.index_copy_.default) == 4
    assert all(map(torch.equal, cache, want))
    other = written(value[..., :64], value, cache, slots)
    assert torch.equal(traced(value[..., :64], value, *cache, slots), other[0])
    assert all(map(torch.equal, cache, other))
