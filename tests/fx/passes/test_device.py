import torch
from torch import nn

from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.passes.device import move_to_device

META = torch.device("meta")


class Factories(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        positions = torch.arange(4, device=x.device).to(torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
        y = torch.cond(x.sum() > 0, lambda x: x + torch.ones(4), lambda x: x - 1, (y.float(),))
        return y + positions + self.offset + torch.full((4,), 2.0) + torch.tensor([1.0, 2, 3, 4])


def test_tensors_and_what_the_graph_names_move():
    with torch.no_grad():
        model = torch.export.export(Factories(), (torch.randn(2, 4),)).module()
    parameters = dict(model.named_parameters())
    moved = move_to_device(model, META)
    assert moved is model
    assert {t.device for t in [*model.parameters(), *model.buffers()]} == {META}
    assert all(p.device.type == "cpu" for p in parameters.values()), "the tensors themselves stay where they are"
    assert isinstance(model.fc.weight, nn.Parameter) and not model.fc.weight.requires_grad
    assert len(graph_modules(model)) > 2
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or value.device == META, node
            assert torch.device("cpu") not in (*node.args, *node.kwargs.values()), node
    (autocast,) = model.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast)
    assert autocast.args[0] == "meta"


def test_a_moved_program_runs_there():
    class Plain(nn.Module):
        def forward(self, x):
            return x + torch.arange(4) + torch.full((4,), 2.0, device="cpu")

    model = move_to_device(torch.export.export(Plain(), (torch.randn(2, 4),)).module(), META)
    assert model(torch.randn(2, 4, device=META)).device == META
