"""A copy of a graph module that shares the tensors of the original."""

import copy
import warnings

from torch.fx import GraphModule

from pt2mx.fx.aliasing import written_roots


def copy_sharing_tensors(model: GraphModule) -> GraphModule:
    """A deep copy of graph, submodules and meta whose parameters and buffers are those of `model`.

    What a pass does to the copy's graph or to the attributes of its modules leaves `model` as it was. Buffers that the
    graph writes (a counter, a cache) are copied, without the gradient that a run may have left in them: running the
    copy must not change `model` either.
    """
    written = written_roots(model.graph)
    memo = {id(parameter): parameter for parameter in model.parameters()}
    for name, buffer in sorted(model.named_buffers(remove_duplicate=False), key=lambda named: named[0] in written):
        memo[id(buffer)] = buffer.detach().clone() if name in written else buffer
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        return copy.deepcopy(model, memo)
