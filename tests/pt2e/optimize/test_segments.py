import pytest
import torch
from torch import nn

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.pt2e.optimize.segments import module_blocks
from tests.models import module_of


def exported(model, *args, **kwargs):
    return torch.export.export(model.eval(), args, **kwargs).module()


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask):
        return x + self.down(torch.relu(self.up(x))) * mask, x.mean()


class Decoder(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(16, 10)

    def forward(self, ids):
        x, mask = self.embedding(ids), (ids != 0).float().unsqueeze(-1)
        total = 0
        for layer in self.layers:
            x, mean = layer(x, mask)
            total = total + mean
        return self.head(x), total


def run(graph, *args):
    """Run all segments one after the other, and compare each with the graph from which it was cut."""
    blocks = module_blocks(graph)
    values = dict(zip(graph.graph.find_nodes(op="placeholder"), args, strict=True))
    for block in blocks:
        module, copies = block.copy(graph)
        outputs = module(*(values[node] for node in block.inputs))
        assert all(copies[node] in module.graph.nodes for node in block.outputs)
        values.update(zip(block.outputs, outputs, strict=True))
    return tuple(values[node] for node in graph.graph.output_node().all_input_nodes)


def test_repeated_modules_and_the_segments_between_them():
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (4, 8))
    graph = exported(Decoder(), ids)
    blocks = module_blocks(graph)
    assert [block.name for block in blocks] == ["", "layers.0", "", "layers.1", "", "layers.2", ""]
    assert [len(block.inputs) for block in blocks][1] == 2  # x, mask
    assert sum(len(block.nodes) for block in blocks) == sum("call" in n.op for n in graph.graph.nodes)
    assert all(torch.equal(a, b) for a, b in zip(run(graph, ids), graph(ids), strict=True))


@pytest.mark.compiled
def test_strict_export_and_dynamic_shapes():
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (4, 8))
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    graph = exported(Decoder(), ids, dynamic_shapes=shapes, strict=True)
    assert [b.name for b in module_blocks(graph)] == ["", "layers.0", "", "layers.1", "", "layers.2", ""]
    other = torch.randint(0, 10, (3, 5))
    assert all(torch.equal(a, b) for a, b in zip(run(graph, other), graph(other), strict=True))


def test_without_repeated_modules_the_graph_is_one_block():
    x = torch.randn(2, 16)
    for model in (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 4)):
        graph = exported(model, x)
        (block,) = module_blocks(graph)
        assert block.name == "" and torch.equal(run(graph, x)[0], graph(x))


def test_a_module_that_is_called_again_is_no_repeated_one():
    def forward(self, x):
        for _ in range(2):
            x, _ = self.layers[0](x, x)
        return x

    x = torch.randn(2, 16)
    (block,) = module_blocks(exported(module_of(forward, layers=nn.ModuleList([Layer()])), x))
    assert block.name == ""


def test_stages_of_blocks_are_cut_at_the_outermost():
    def stage():
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))

    graph = exported(nn.Sequential(stage(), stage()), torch.randn(2, 16))
    assert [block.name for block in module_blocks(graph)] == ["0", "1"]


def test_modules_whose_nodes_are_interleaved_are_one_block():
    def forward(self, x):
        first, _ = self.layers[0](x, x)
        return self.layers[2](first, x)[0] + self.layers[1](first, x)[0]

    x = torch.randn(2, 16)
    graph = exported(module_of(forward, layers=nn.ModuleList(Layer() for _ in range(3))), x)
    assert [b.name for b in module_blocks(graph)] == ["layers.0", "layers.2", "layers.1", ""]
    stacks = {name: [n for n in graph.graph.nodes if f"layers.{name}" in str(n.meta)] for name in "012"}
    late = stacks["0"][-1]  # as if a node of the first layer ran among the nodes of the last
    moved = next(n for n in graph.graph.nodes if n in stacks["1"] and n.op == "call_function" and n.all_input_nodes)
    moved.meta["nn_module_stack"] = late.meta["nn_module_stack"]
    assert module_blocks(graph)[0].name.startswith("layers.0, layers.2")
    torch.testing.assert_close(run(graph, x)[0], graph(x))


def test_written_memory_is_seen_by_name():
    def forward(self, x):
        self.count.add_(1)
        for layer in self.layers:
            x, _ = layer(x, x)
        return x + self.count

    model = module_of(forward, layers=nn.ModuleList(Layer() for _ in range(2)), count=nn.Buffer(torch.zeros(())))
    graph = exported(model, torch.randn(2, 16))
    written = written_nodes(graph.graph)
    assert [bool(written & set(block.nodes)) for block in module_blocks(graph) if block.name] == [False, False]
