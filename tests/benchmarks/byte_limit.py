"""The least time of a step of decoding: the bytes that it reads over the bandwidth of the memory."""

import statistics

import torch

from pt2mx import LanguageModel
from pt2mx.fx.graph.node import tensor_of
from tests.benchmarks.measure import gpu_medians_in_turns, timed

#: bytes of the tensor whose copy is timed
_COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}


def bytes_of_step(model: LanguageModel, batch: int, slots: int) -> int:
    """Return the bytes of all weights and scales, and of a cache. Of a table of embeddings a step reads single rows."""
    decoder, embedding = model.decoder, torch.ops.aten.embedding.default
    nodes = decoder.graph.find_nodes(op="get_attr")
    read = [tensor_of(decoder, node) for node in nodes if any(user.target is not embedding for user in node.users)]
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in read}
    of_slot = sum(tensor.nbytes for layer in model.new_cache(1, 1).layers for tensor in layer.tensors)
    return sum(weights.values()) + batch * slots * of_slot // model.new_cache(1, 1).slots


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second of a copy, read and written, as measured."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type == "cuda":
        (seconds,) = gpu_medians_in_turns([lambda: target.copy_(source)], 20)
    else:
        seconds = statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / seconds
