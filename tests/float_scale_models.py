"""A model that is quantized with scales other than E8M0, without a quantizer."""

import torch
from torch.nn import functional as F

import pt2mx
from pt2mx.fx.graph.qdq import insert_quantize_dequantize
from tests.flow import exported

IDS = torch.arange(6).reshape(2, 3)


class Net(torch.nn.Module):
    """An embedding, a linear layer with a GELU, and two layers of its result."""

    def __init__(self):
        super().__init__()
        self.e, self.a = torch.nn.Embedding(10, 64), torch.nn.Linear(64, 96)
        self.b, self.c = torch.nn.Linear(96, 32, bias=False), torch.nn.Linear(96, 48, bias=False)

    def forward(self, ids):
        x = F.gelu(self.a(self.e(ids)))
        return self.b(x).relu(), self.c(x).relu()


def quantized(model, *args, name="nvfp4"):
    """Return the exported model with pairs at its weights and at the inputs of its matmuls."""
    spec, graph_module = pt2mx.parse(name), exported(model, *args)
    pairs: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(graph_module.graph.nodes):
        operands = {"aten.linear.default": (0, 1), "aten.embedding.default": (0,)}.get(str(node.target), ())
        for index in operands:
            operand, is_weight = node.args[index], node.args[index].op == "get_attr"
            spec_of_operand = spec if is_weight else spec.replace(block_rows=1)
            if operand not in pairs:
                pairs[operand] = insert_quantize_dequantize(operand, spec_of_operand, node)
            node.update_arg(index, pairs[operand])
    graph_module.recompile()
    return graph_module
