"""Give equal sizes of a decoder's inputs one symbol. torch.export gives each dimension a symbol, and proves them equal.

A decoder of 30 layers has 60 tensors of keys and values, each with a batch size and a number of slots: 120 symbols for
two sizes. Their proofs took a quarter of the export.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._functorch import config
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from pt2mx.pt2e.language.cache import equal_dims


class _SharingShapeEnv(ShapeEnv):
    """A `ShapeEnv` that gives dynamic sizes one symbol where the example inputs have equal sizes."""

    def create_symbol(
        self,
        val: Any,
        source: Any,
        dynamic_dim: DimDynamic = DimDynamic.DUCK,
        constraint_dim: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dynamic_dim is DimDynamic.DYNAMIC and isinstance(val, int):
            dynamic_dim, constraint_dim = DimDynamic.DUCK, None
        return super().create_symbol(val, source, dynamic_dim, constraint_dim, *args, **kwargs)


@contextmanager
def shared_sizes(example: dict[str, Any]) -> Iterator[None]:
    """Export decoders with one symbol for each size, within the context.

    Args:
        example: the inputs of the decoder. If two sizes that may differ are equal here, each dimension gets a symbol.
    """
    groups = [*equal_dims(example), [(example["logits_to_keep"], 0)]]
    sizes = [size for (first, dim), *_ in groups if (size := first.shape[dim]) > 1]  # 1 has no symbol
    if len(set(sizes)) < len(sizes):
        yield
        return
    shapes = _SharingShapeEnv(tracked_fakes=[], trace_asserts=True)
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # as torch.export: an error instead of address 0
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)
    with tracing(TracingContext(mode)):
        yield
