import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer
from pt2mx.pt2e.program.build_program import can_become_program, program_of
from tests.flow import calibrated, described
from tests.models import module_of


class TiedNet(nn.Module):
    """Tied weights, buffers of both kinds, a constant, a written input, sizes that must be equal."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.randn(64))
        self.register_buffer("scale", torch.rand(64) + 1, persistent=False)

    def forward(self, ids, offsets, count):
        count.add_(1)
        x = self.inner(self.table(ids)) * self.scale + self.shift
        return self.head(x) + torch.tensor([0.5]), x[:1] + offsets[:, None, None].float().sum()


@pytest.mark.compiled_except("mxfp4_weight_only")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
def test_the_program_of_a_graph_is_that_of_an_export(recipe, tmp_path):
    torch.manual_seed(0)
    batch = torch.export.Dim("batch")
    args, shapes = (torch.arange(6).reshape(2, 3), torch.ones(2), torch.zeros(1)), ({0: batch}, {0: batch}, None)
    first = torch.export.export(TiedNet().eval(), args, dynamic_shapes=shapes)
    converted = pt2mx.convert_pt2e(calibrated(first.module(), MXQuantizer.from_recipe(recipe), *args))
    traced = torch.export.export(converted, args, dynamic_shapes=shapes)
    made = program_of(converted, first)
    assert described(made) == described(traced) and made.range_constraints == traced.range_constraints
    assert made.state_dict.keys() == traced.state_dict.keys()
    assert {(s.kind, s.target, s.persistent) for s in made.graph_signature.input_specs} == {
        (s.kind, s.target, s.persistent) for s in traced.graph_signature.input_specs
    }
    pt2mx.save_program(made, tmp_path / "net.pt2")
    for program in (made, pt2mx.load_program(tmp_path / "net.pt2")):
        module, inputs = program.module(), (torch.arange(15).reshape(5, 3), torch.ones(5), torch.zeros(1))
        assert all(map(torch.equal, module(*inputs), converted(*inputs))) and inputs[2] == 2
        with pytest.raises(AssertionError, match=r"offsets.size\(\)\[0\] == ids.size\(\)\[0\]"):
            module(inputs[0], torch.ones(4), inputs[2])


def test_which_graphs_become_a_program_without_an_export():
    branches = module_of(lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    pair = module_of(lambda self, x: (x + 1, None))
    for net, expected in ((torch.nn.Linear(4, 4), True), (branches, False), (pair, False)):
        program = torch.export.export(net.eval(), (torch.ones(2, 4),))
        assert can_become_program(program.module(), program) is expected
