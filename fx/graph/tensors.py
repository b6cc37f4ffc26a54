"""The tensors of a graph module: copy and replace them, move them to a device, and remove unused tensors.

Tensors that share memory which the graph writes still share it afterwards. Subgraphs keep all of their attributes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, PythonCode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import storage_of, written_storages
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.modes import has_effect

T = TypeVar("T")
#: the dtypes in which models compute, between which `cast_floats` casts
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def copy_sharing_tensors(model: GraphModule, delays_code: bool = False) -> GraphModule:
    """Return a deep copy of graph, submodules and meta that shares the parameters and buffers of `model`.

    A pass may change the copy's graph and the attributes of its modules without changing `model`. The memory that the
    graph writes (a counter, a cache) is copied, without the gradient that a run may have left in it: running the copy
    must not change `model` either.

    delays_code: the copy and its subgraphs have no code until `generate_code`. torch.fx generates code after each
        change.
    """
    written = written_storages(model)
    tensors = _tensors_of(model)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    memo |= replaced([tensor for tensor in tensors if storage_of(tensor) in written], written, Tensor.clone)
    if delays_code:
        for module in graph_modules(model):
            graph = deep_copy(module.graph, memo)
            graph.set_codegen(_NoCode(graph._codegen))
            memo[id(module.graph)] = graph
    return deep_copy(model, memo)


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return `copy.deepcopy(value, memo)` without torch's warnings."""
    with without_torch_warnings():
        return copy.deepcopy(value, memo)


@contextmanager
def without_torch_warnings() -> Iterator[None]:
    """Silence what torch warns of its own code, by which it copies and exports graphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        yield


class _NoCode(CodeGen):
    """Generates an empty function, which takes no time.

    Args:
        final: what generates the code after the last change.
    """

    def __init__(self, final: CodeGen) -> None:
        super().__init__()
        self.final = final

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> PythonCode:
        return Graph().python_code("self")


def generate_code(model: GraphModule) -> GraphModule:
    """Generate the code of a model whose code is delayed. Changes `model` and returns it."""
    graphs = graph_modules(model)
    for graph in graphs:
        codegen = graph.graph._codegen
        if isinstance(codegen, _NoCode):
            graph.graph.set_codegen(codegen.final)
    for graph in graphs:
        graph.recompile()
    return model


def map_tensors(
    model: GraphModule, function: Callable[[Tensor], Tensor], storages: Container[int] | None = None
) -> None:
    """Replace every parameter and buffer by `function(tensor)`, called once for a tied tensor. Changes `model`, not the
    tensors.

    The results require no gradient: under torch.compile, an operator without a gradient fails if one is required.

    storages: call the function for tensors in these only (`storages_of`); None for all.
    """
    results = replaced(_tensors_of(model), written_storages(model), function, storages)
    for tensors, name, tensor in tensor_places(model):
        value = results[id(tensor)]
        tensors[name] = value.requires_grad_(False) if isinstance(tensor, nn.Parameter) else value


def replace_tensor(model: GraphModule, old: Tensor, new: Tensor, in_place: bool = False) -> None:
    """Replace a parameter or buffer by `new`, under each of its names; a parameter stays a parameter.

    in_place: copy `new` into the old memory, which other models may share, unless another tensor of `model` shares it.
    """
    if in_place and _is_alone(model, old):
        old.detach().copy_(new)
        return
    for tensors, name, tensor in tensor_places(model):
        if tensor is old:
            tensors[name] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def tensor_places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield each place of a parameter or buffer, a dict and its key, with the tensor; a tied one has several."""
    tensors: dict[str, Any]
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from ((tensors, name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _is_alone(model: GraphModule, tensor: Tensor) -> bool:
    """Return whether no other tensor of the model shares the memory, and no two elements of this one do."""
    sharing = [other for other in _tensors_of(model) if storage_of(other) == storage_of(tensor)]
    return all(other is tensor for other in sharing) and 0 not in tensor.stride()


def tensors_in_written_memory(model: GraphModule) -> dict[str, Tensor]:
    """Return the parameters and buffers, under every name, whose memory the graph of `model` writes."""
    written = written_storages(model)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named if storage_of(tensor) in written}


def replaced(
    tensors: list[Tensor],
    written: set[int],
    function: Callable[[Tensor], Tensor],
    storages: Container[int] | None = None,
) -> dict[int, Tensor]:
    """Map the id of each tensor to `function` of it; of one that is in none of the `storages`, to itself. Tensors in a
    written storage become views of `function` of that storage, so that they share it."""
    memory: dict[int, torch.UntypedStorage] = {}
    results: dict[int, Tensor] = {}
    for tensor in tensors:
        key, value = storage_of(tensor), tensor.detach()
        if storages is None or key in storages:
            if key not in written:
                value = function(value)
            else:
                if key not in memory:
                    whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
                    memory[key] = function(whole).untyped_storage()
                view = torch.empty(0, dtype=value.dtype, device=memory[key].device)
                value = view.set_(memory[key], value.storage_offset(), value.shape, value.stride())
        results[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    return results


def storages_of(model: nn.Module) -> set[int]:
    """Return the storages of the parameters and buffers of a model."""
    return set(map(storage_of, _tensors_of(model)))


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def delete_unused_tensors(model: GraphModule) -> None:
    """Delete unused parameters, buffers and modules: those that no `get_attr` of the graph reads."""
    read = {node.target for node in model.graph.find_nodes(op="get_attr")}
    for path, module in _own_modules(model):
        for name in [*module._parameters, *module._buffers]:
            if (f"{path}.{name}" if path else name) not in read:
                delattr(module, name)
    delete_unused_modules(model)


def remove_unused(model: GraphModule) -> GraphModule:
    """Delete unused nodes, tensors and modules of an exported graph. Changes `model` and returns it."""
    model.graph.eliminate_dead_code(has_effect)
    delete_unused_tensors(model)
    model.recompile()
    return model


def erase_unused(node: Node) -> None:
    """Erase an unused node, and the nodes that only it used."""
    if node.users or node.op not in ("call_function", "get_attr") or has_effect(node):
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for n in inputs:
        erase_unused(n)


def replace_node(node: Node, new: Node, *but: str) -> None:
    """Let another node take the place and the meta of one, without the keys `but`; erase what nothing uses then."""
    new.meta.update({key: value for key, value in node.meta.items() if key not in but})
    node.replace_all_uses_with(new)
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for n in inputs:
        erase_unused(n)


def delete_unused_modules(model: GraphModule) -> None:
    """Delete the submodules that the graph neither calls nor reads from."""
    targets = [node.target for node in model.graph.nodes if node.op in ("call_module", "get_attr")]
    used = {target[:end] for target in targets for end in _ends(target)}
    for path, _ in _own_modules(model):
        if path and path not in used and path.rpartition(".")[0] in {"", *used}:
            model.delete_submodule(path)


def _ends(path: str) -> list[int]:
    return [i for i, character in enumerate(path) if character == "."] + [len(path)]


def _own_modules(model: GraphModule) -> list[tuple[str, torch.nn.Module]]:
    """Return the model and its submodules by path, except those inside a module that the graph calls or passes on."""
    closed = {node.target for node in model.graph.nodes if node.op in ("call_module", "get_attr")}
    modules = list(model.named_modules(remove_duplicate=False))
    return [(path, module) for path, module in modules if not any(path[:end] in closed for end in _ends(path)[:-1])]


def move_to_device(model: GraphModule, device: torch.device | str) -> GraphModule:
    """Move a model and its subgraphs to `device`.

    This changes parameters and buffers, `val` meta, and the device arguments of factories, casts, assertions and
    autocast. Tensors already on the device are shared. Changes `model` and returns it.
    """
    device = device_named(device)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return device if isinstance(value, torch.device) else value

    for graph in graph_modules(model):
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast):
            node.args = (device.type, *node.args[1:])
    return map_values(model, moved)


def cast_floats(model: GraphModule, dtype: torch.dtype) -> GraphModule:
    """Cast a float model and its subgraphs to another dtype, as `nn.Module.to` would before an export.

    This changes tensors in float32, float16 and bfloat16, `val` meta, and the dtype arguments of casts and factories,
    also those that take the default dtype. Numbers beyond the range of the dtype, such as the masks of attention,
    become its largest. Changes `model` and returns it.
    """
    largest = torch.finfo(dtype).max

    def cast(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value):
            return max(-largest, min(value, largest))
        if isinstance(value, torch.dtype) and value in _FLOATS:
            return dtype
        return floats_in(dtype, value) if isinstance(value, Tensor) else value

    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if isinstance(node.meta.get("val"), Tensor) and _has_dtype(node.target):
                node.kwargs = {"dtype": node.meta["val"].dtype, **node.kwargs}
    return map_values(model, cast)


def _has_dtype(target: object) -> bool:
    """Return whether an operator has the dtype of its result as a keyword argument."""
    arguments = target._schema.arguments if isinstance(target, OpOverload) else ()
    return any(argument.name == "dtype" and argument.kwarg_only for argument in arguments)


def floats_in(dtype: torch.dtype, tree: T) -> T:
    """Return a tree with its tensors in float32, float16 and bfloat16 cast to a dtype."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in _FLOATS else t, tree)


def map_values(
    model: GraphModule, function: Callable[[Any], Any], storages: Container[int] | None = None
) -> GraphModule:
    """Replace the tensors of a model, those that `map_tensors` does, and the arguments and `val` meta of all nodes.
    Changes `model` and returns it."""
    map_tensors(model, function, storages)
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, function), map_aggregate(node.kwargs, function)
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], function)
        graph.recompile()
    return model


def device_named(device: torch.device | str) -> torch.device:
    """Return `device` with its index, because the assertions of an exported graph compare the index too."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        raise MXError(
            f"device={device!r} must be a torch.device that this torch can use, or its name, such as 'cpu' or"
            f" 'cuda:0': {str(error).splitlines()[0]}"
        ) from None
