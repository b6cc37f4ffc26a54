import pytest
import torch
from torch import nn

from pt2mx import ops
from pt2mx.fx.passes.cache_writes import fuse_cache_writes
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.cache import store_mx
from tests.fx.passes.test_packed_attention import cloned, inputs
from tests.graph import calls

aten = torch.ops.aten


class Step(nn.Module):
    """Writes one token to a cache of codes, changes one of the key, the value and the slot in place, and attends over
    all."""

    def __init__(self, modes=("floor", "even"), value_modes=("floor", "even"), slot=0, reads=False, changed=None):
        super().__init__()
        self.modes, self.value_modes, self.slot, self.reads, self.changed = modes, value_modes, slot, reads, changed

    def forward(self, query, key, value, mask, slot, *cache):
        for i, (x, modes) in enumerate(((key, self.modes), (value, self.value_modes))):
            scale, codes = ops.quantize_mx(x, "fp8_e4m3", 32, -1, *modes)
            at = slot + self.slot if i and self.slot else slot
            cache[2 * i].index_copy_(2, at, codes)
            cache[2 * i + 1].index_copy_(2, at, scale)
        if self.changed is not None:
            (key, value, slot)[self.changed].add_(1)
        attention = attention_mx(query, *cache, "fp8_e4m3", 32, 64, mask)
        return (attention, cache[0].sum()) if self.reads else attention


def program_of(module, args):
    return torch.export.export(module, tuple(cloned(args))).module(check_guards=False)


def test_keys_and_values_are_stored_by_one_call():
    args = inputs()
    model = program_of(Step(), args)
    mine, theirs = cloned(args), cloned(args)
    want = model(*theirs)
    fuse_cache_writes(model)
    assert len(calls(model, store_mx)) == 1
    assert not calls(model, ops.quantize_mx, aten.index_copy_.default)
    assert torch.equal(model(*mine), want) and all(map(torch.equal, mine[5:], theirs[5:]))
    assert not torch.equal(mine[5], args[5])


@pytest.mark.parametrize(
    "module",
    [
        *(Step(value_modes=("ceil", "even")), Step(slot=1), Step(reads=True), Step(("floor", "stochastic"))),
        *(Step(changed=i) for i in range(3)),
    ],
)
def test_what_stays(module):
    model = program_of(module, inputs())
    fuse_cache_writes(model)
    assert not calls(model, store_mx) and len(calls(model, aten.index_copy_.default)) == 4
