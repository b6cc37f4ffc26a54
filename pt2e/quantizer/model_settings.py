"""The settings of a quantizer for the whole model: a filter, algorithms, the cache format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.fx import Node

from pt2mx.algorithms.options import Algorithm, chosen_algorithms
from pt2mx.errors import MXError
from pt2mx.pt2e.quantizer.config import checked_spec
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class ModelSettings:
    """Settings for the whole model; each setter returns the quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self._filter: Callable[[Node], bool] | None = None
        self._algorithms: tuple[Algorithm, ...] | None = None
        self._kv_cache: MXSpec | None = None

    def set_filter_function(self, function: Callable[[Node], bool] | None) -> Self:
        """Quantize only the operators for which a function returns True. A filter cannot be stored in a recipe.

        Args:
            function: gets the `torch.fx.Node` of an operator, and returns whether to quantize it; None removes the
                filter.

        Returns:
            The quantizer.

        Raises:
            MXError: for an object that is not callable.
        """
        if function is not None and not callable(function):
            raise MXError(f"the filter must be a function of a node that returns a bool, not {function!r}")
        self._filter = function
        return self

    @property
    def filter_function(self) -> Callable[[Node], bool] | None:
        """Return the function that `set_filter_function` set.

        Example:
            >>> import pt2mx
            >>> pt2mx.MXQuantizer().filter_function is None
            True
        """
        return self._filter

    @property
    def algorithms(self) -> tuple[Algorithm, ...] | None:
        """Return the algorithms that `set_algorithms` or a recipe set, in the order of application; None: not set.

        Returns:
            A tuple of algorithms of `pt2mx.algorithms`, or None.
        """
        return self._algorithms

    def set_algorithms(self, algorithms: str | Sequence[Algorithm] | Mapping[str, object] | None) -> Self:
        """Set the algorithms with which `pt2mx.optimize` and `pt2mx quantize` round the weights.

        Args:
            algorithms: a preset ("fast", "imatrix", "balanced", "best"), algorithms of `pt2mx.algorithms`, or a mapping
                from their names to their options. None: `pt2mx.optimize` uses "balanced", `pt2mx quantize` rounds to
                nearest.

        Returns:
            The quantizer.

        Raises:
            MXError: for an unknown preset, algorithm or option.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4").set_algorithms("fast")
            >>> quantizer.algorithms
            (ScaleSearch(by_inputs=False),)
        """
        self._algorithms = None if algorithms is None else chosen_algorithms(algorithms)
        return self

    @property
    def kv_cache(self) -> MXSpec | None:
        """Return the spec that `set_kv_cache` or a recipe set; None: the cache stays in high precision.

        Returns:
            An `MXSpec`, or None.
        """
        return self._kv_cache

    def set_kv_cache(self, spec: MXSpec | str | None) -> Self:
        """Set the format of keys and values that a decoder writes to its cache, blocks along the head dimension.

        It applies to writes by `aten.index_copy_`, as of a cache of fixed length, and overrides the settings of the
        modules around them. A language model of `pt2mx.quantize_language_model` stores codes and scales.

        A token must not change the scale of earlier ones. So the scale of a whole tensor, where a format has one, is 1:
        `"nvfp4"` means `fp4_e2m1{16}(e4m3)` here, for values up to 2688 (6 * 448).

        Args:
            spec: None leaves the cache in high precision.

        Returns:
            The quantizer.

        Raises:
            MXError: for an unknown spec, and for blocks of several rows, which are tokens.

        Example:
            >>> import pt2mx
            >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8")
            >>> str(quantizer.kv_cache)
            'mxfp8_e4m3{32}'
            >>> str(quantizer.set_kv_cache("nvfp4").kv_cache)
            'fp4_e2m1{16}(e4m3)'
        """
        checked = checked_spec("kv_cache", spec)
        self._kv_cache = None if checked is None else _of_tokens(checked)
        return self


def _of_tokens(spec: MXSpec) -> MXSpec:
    """Return the format of tensors to which tokens are added, in which blocks run along the last dimension."""
    if spec.block_rows > 1:
        raise MXError(f"kv_cache: {spec} has blocks of {spec.block_rows} rows, which are tokens: choose one row")
    scale = spec.scale_format
    without = next(f for f in SCALE_FORMATS.values() if not f.tensor and (f.grid, f.dtype) == (scale.grid, scale.dtype))
    return spec.replace(axis=-1, scale_format=without)
