"""The graph of a converted model for transformers' `ExecutorchExporter`."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.fx.shifts import without_shifts
from pt2mx.pt2e.executorch.edge import edge_ready


def executorch_graph(program: ExportedProgram) -> GraphModule:
    """Return the graph in core aten operators, which ExecuTorch's portable kernels run."""
    return without_shifts(edge_ready(program)).module()
