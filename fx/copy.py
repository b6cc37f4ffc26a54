"""A copy of a graph module that shares the tensors of the original."""

import copy
import warnings

from torch.fx import GraphModule

from pt2mx.fx.aliasing import written_roots


def copy_sharing_tensors(model: GraphModule) -> GraphModule:
    """A deep copy of graph, submodules and meta whose parameters and buffers are those of `model`.

    What a pass does to the copy's graph or to the attributes of its modules leaves `model` as it was. Buffers that the
    graph writes (a counter, a cache) are copied: running the copy must not change `model` either.
    """
    written = written_roots(model.graph)
    buffers = [buffer for name, buffer in model.named_buffers() if name not in written]
    tensors = [*model.parameters(), *buffers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        return copy.deepcopy(model, {id(t): t for t in tensors})
