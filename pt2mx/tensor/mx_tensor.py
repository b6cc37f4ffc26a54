"""`MXTensor`: a tensor whose values are MX codes, the eager face of the operators. Design: operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pt2mx.analysis.measure import MXStorage
from pt2mx.arrays import as_torch
from pt2mx.errors import MXError
from pt2mx.extras import without_log_warnings
from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.functional import quantize_mx, tensor_scale_mx
from pt2mx.kernels.packing import packed_length, unpacked_length
from pt2mx.ops.checks import HIGH_PRECISION, check_packed, check_tensors
from pt2mx.ops.memory_format import dense_strides, order_in_memory
from pt2mx.ops.quantization import Dequantize
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec, parse

with without_log_warnings():
    from torchao.utils import TorchAOBaseTensor


class MXTensor(TorchAOBaseTensor):
    """A tensor (..., n, ...) that stores MX codes and scales, and has the shape, strides, dtype and device of its
    values in high precision.

    `MXTensor.to_mx(x, "mxfp4")` quantizes, `.to_dtype()` gives the values back; both are differentiable, the gradient
    passing straight through. Matmuls (`linear`, `matmul`, `mm`, `addmm`, `bmm`, ...) compute with the dequantized
    values and give a plain tensor. Operators that move values (transposes, views, slices, ...) move whole blocks and
    give an `MXTensor`. An operator that would split a block raises `MXError`, and so does every other operator. No
    operator quantizes again behind the caller's back.

    A parameter is `nn.Parameter(MXTensor.to_mx(...), requires_grad=False)`. It goes through `torch.save`, `torch.load`
    with `weights_only=True`, `copy.deepcopy`, pickle and `torch.compile`. safetensors holds plain tensors only:
    `pt2mx.tensor.state` takes a state dict apart into such and puts it together again.

    Args:
        qdata: (..., bytes, ...) uint8, packed along `axis`, as `quantize_mx` gives it.
        scale: (..., ceil(n / block_size), ...) uint8, E8M0, or as `quantize_mx` gives it for another scale format.
        elem_dtype: the element format, as `parse_element` takes it.
        block_size: values that share a scale.
        axis: the dimension along which blocks run.
        dtype: of the values: float32, float16 or bfloat16.
        length: n; by default every code that `qdata` holds.
        stride: of the values; by default dense, in the order of `qdata`'s dimensions.
        scale_format: the format of scales, as `parse_scale_format` takes it.
        block_rows: rows that share a scale, as `MXSpec` has them.
        tensor_scale: () float32, of scale formats with one. Views share it.

    Raises:
        MXError: where these do not fit each other, and for an operator that does not take an `MXTensor`.

    Example:
        >>> import torch, pt2mx
        >>> weight = pt2mx.MXTensor.to_mx(torch.eye(4), "mxfp4")
        >>> weight
        MXTensor(shape=(4, 4), elem_dtype=fp4_e2m1, block_size=32, axis=1, dtype=torch.float32, device='cpu')
        >>> weight.qdata.shape, weight.scale.shape
        (torch.Size([4, 2]), torch.Size([4, 1]))
        >>> torch.arange(4.0) @ weight
        tensor([0., 1., 2., 3.])
    """

    qdata: Tensor
    scale: Tensor
    block_size: int
    axis: int
    # strings, so that a checkpoint holds plain types
    _element_name: str
    # the defaults are for checkpoints of older versions
    _scale_name: str = "e8m0"
    block_rows: int = 1
    tensor_scale: Tensor | None = None

    @staticmethod
    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor,
        elem_dtype: object,
        block_size: int = 32,
        axis: int = -1,
        dtype: torch.dtype = torch.float32,
        length: int | None = None,
        stride: Sequence[int] | None = None,
        scale_format: object = "e8m0",
        block_rows: int = 1,
        tensor_scale: Tensor | None = None,
    ) -> MXTensor:
        check_tensors(qdata=qdata, scale=scale)
        spec = MXSpec(elem_dtype, block_size, axis, scale_format=scale_format, block_rows=block_rows)
        spec, length = check_packed(qdata, scale, spec, dtype, length, tensor_scale)
        shape = [*qdata.shape]
        shape[spec.axis] = length
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=dense_strides(shape, order_in_memory(qdata)) if stride is None else stride,
            dtype=dtype,
            device=qdata.device,
        )
        self.qdata, self.scale = qdata, scale
        self._element_name, self.block_size, self.axis = spec.element.name, spec.block_size, spec.axis
        self._scale_name, self.block_rows, self.tensor_scale = spec.scale_format.name, spec.block_rows, tensor_scale
        return self

    @staticmethod
    def to_mx(
        data_hp: object,
        elem_dtype: object,
        block_size: int | None = None,
        axis: int | None = None,
        scale_mode: str | None = None,
        rounding: str | None = None,
        seed: int | None = None,
        tensor_scale: Tensor | None = None,
    ) -> MXTensor:
        """Quantize; the gradient passes straight through to `data_hp`.

        Args:
            data_hp: (..., n, ...) float32, float16 or bfloat16: a tensor, an array of NumPy or JAX, whose dtype it
                gets, or nested lists of numbers, which become float32.
            elem_dtype: the element format, as `pt2mx.parse` takes it; a spec or a spelling with a block size sets the
                other arguments, and an argument that is passed too wins.
            block_size: values that share a scale; by default 32.
            axis: the dimension along which blocks run; by default -1.
            scale_mode: how the shared exponent follows from the block's values; by default "floor".
            rounding: how values are rounded to the element's grid; by default "even".
            seed: of `rounding="stochastic"`; None for another draw each call.
            tensor_scale: () float32, of formats with a scale a tensor (`"nvfp4"`); by default `tensor_scale_mx` of
                `data_hp`.

        Returns:
            The quantized tensor, in the shape, strides, dtype and device of `data_hp`.

        Raises:
            MXError: as `quantize_mx` does; for a tensor without dimensions; for one that is an `MXTensor` already; for
                what is no array.

        Example:
            >>> import pt2mx
            >>> pt2mx.MXTensor.to_mx([0.3, 1.0, 2.9, -7.0], "mxfp4").to_dtype()
            tensor([ 0.5000,  1.0000,  3.0000, -6.0000])
        """
        if isinstance(data_hp, MXTensor):
            raise MXError(f"to_mx: {data_hp.description} is quantized already; quantize its .to_dtype() if you mean it")
        if not isinstance(data_hp, Tensor):
            data_hp = _of_lists(data_hp) if isinstance(data_hp, list | tuple) else as_torch(data_hp)
        if not data_hp.dim():
            raise MXError(f"to_mx: a tensor of at least one dimension has blocks, {data_hp!r} has none")
        fields = {"block_size": block_size, "axis": axis, "scale_mode": scale_mode, "rounding": rounding}
        spec = parse(elem_dtype, **{name: value for name, value in fields.items() if value is not None})
        spec.check_operators()
        # plain values: Dynamo's graph breaks at a function of autograd that takes another object
        modes = spec.scale_mode, spec.rounding, spec.scale_format.name, spec.block_rows
        return _quantized(data_hp, tensor_scale, spec.element.name, spec.block_size, spec.axis, *modes, seed)

    @property
    def elem_dtype(self) -> ElementFormat:
        """The element format."""
        return ELEMENTS[self._element_name]

    @property
    def spec(self) -> MXSpec:
        """The element, scale format, blocks and axis (from the front); codes do not tell how they were rounded."""
        scales, blocks = SCALE_FORMATS[self._scale_name], (self.block_size, self.axis)
        return MXSpec(self.elem_dtype, *blocks, scale_format=scales, block_rows=self.block_rows)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The plain tensors by name: `qdata`, `scale`, and `tensor_scale` where the scale format has one."""
        tensors = {"qdata": self.qdata, "scale": self.scale}
        return tensors if self.tensor_scale is None else {**tensors, "tensor_scale": self.tensor_scale}

    def statistics(self) -> dict[str, object]:
        """Return size and compression, as pychop's `MXTensor.statistics()`; `pt2mx.mx_statistics` also measures the
        loss.

        Returns:
            `format`, `exp_bits` and `sig_bits` of the element (an integer has no exponent bits), `block_size`,
            `scale_exp_bits`, `scale_sig_bits`, `original_shape`, `num_blocks`, `total_elements`, `bits_per_element`
            with its share of the scale, and `compression_ratio_fp32` and `compression_ratio_fp16`.

        Example:
            >>> import torch, pt2mx
            >>> statistics = pt2mx.MXTensor.to_mx(torch.ones(4, 64), "mxfp4").statistics()
            >>> statistics["num_blocks"], statistics["bits_per_element"]
            (8, 4.25)
        """
        return MXStorage.of(self.shape, self.spec).to_dict()

    def is_shared(self) -> bool:
        """Return True if codes and scales are in shared memory, as `torch.Tensor.is_shared`.

        Returns:
            True or False.

        Example:
            >>> import torch, pt2mx
            >>> pt2mx.MXTensor.to_mx(torch.ones(4), "mxfp4").is_shared()
            False
        """
        return all(part.is_shared() for part in self.parts.values())

    def share_memory_(self) -> MXTensor:
        """Move codes and scales to shared memory, in place, as `torch.Tensor.share_memory_`.

        Returns:
            This tensor.

        Example:
            >>> import torch, pt2mx
            >>> pt2mx.MXTensor.to_mx(torch.ones(4), "mxfp4").share_memory_().is_shared()
            True
        """
        for part in self.parts.values():
            part.share_memory_()
        return self

    def holds_whole_blocks(self, length: int) -> bool:
        """Return True if the first `length` values along the axis are whole blocks that end where a byte ends.

        Args:
            length: a count of values.

        Returns:
            True or False.

        Example:
            >>> import torch, pt2mx
            >>> x = pt2mx.MXTensor.to_mx(torch.ones(64), "mxfp4")
            >>> x.holds_whole_blocks(32), x.holds_whole_blocks(16)
            (True, False)
        """
        bits = self.elem_dtype.bits
        return length % self.block_size == 0 and unpacked_length(packed_length(length, bits), bits) == length

    @property
    def description(self) -> str:
        """The shape, element, blocks, axis and scale format, for messages."""
        scales = "" if self._scale_name == "e8m0" else f", {self._scale_name} scales"
        return (
            f"an MXTensor of shape {tuple(self.shape)} ({self._element_name} in blocks of {self.spec.blocks} along "
            f"dimension {self.axis}{scales})"
        )

    def to_dtype(self, target_dtype: torch.dtype | None = None) -> Tensor:
        """Dequantize; the gradient passes unchanged.

        Args:
            target_dtype: float32, float16 or bfloat16; by default `self.dtype`.

        Returns:
            The values, (..., n, ...) in `target_dtype`.

        Raises:
            MXError: for another dtype.

        Example:
            >>> import torch, pt2mx
            >>> pt2mx.MXTensor.to_mx(torch.ones(2), "mxfp8").to_dtype(torch.bfloat16)
            tensor([1., 1.], dtype=torch.bfloat16)
        """
        return _dequantized(self, self.dtype if target_dtype is None else target_dtype)

    def with_parts(
        self, qdata: Tensor, scale: Tensor, axis: int, values: Tensor, tensor_scale: Tensor | None = None
    ) -> MXTensor:
        """Return other storage of the same format.

        Args:
            qdata: the new codes.
            scale: the new scales.
            axis: the dimension along which their blocks run.
            values: any tensor with the shape, strides and dtype of the new values, a meta tensor for example.
            tensor_scale: the new scale of the tensor; by default the scale of this one.

        Returns:
            The tensor.

        Example:
            >>> import torch, pt2mx
            >>> x = pt2mx.MXTensor.to_mx(torch.eye(4), "mxfp4")
            >>> x.with_parts(x.qdata[:2], x.scale[:2], 1, torch.empty(2, 4, device="meta")).shape
            torch.Size([2, 4])
        """
        if tensor_scale is None:
            tensor_scale = self.tensor_scale
        of_values = values.dtype, values.shape[axis], values.stride()
        scales = self._scale_name, self.block_rows, tensor_scale
        return MXTensor(qdata, scale, self.elem_dtype, self.block_size, axis, *of_values, *scales)

    def __repr__(self) -> str:
        rows = "" if self.block_rows == 1 else f"block_rows={self.block_rows}, "
        scales = "" if self._scale_name == "e8m0" else f"scale_format={self._scale_name}, "
        return (
            f"MXTensor(shape={tuple(self.shape)}, elem_dtype={self._element_name}, block_size={self.block_size}, "
            f"{rows}{scales}axis={self.axis}, dtype={self.dtype}, device={str(self.device)!r})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        scales = self._scale_name, self.block_rows
        return [*self.parts], (self._element_name, self.block_size, self.axis, self.dtype, *scales)

    @classmethod
    def __tensor_unflatten__(
        cls,
        parts: dict[str, Tensor],
        format: tuple,
        size: Sequence[int],
        stride: Sequence[int],
    ) -> MXTensor:
        # the length is not in `format`, which compiled code compares: it may be symbolic
        element, block_size, axis, dtype, scale_format, block_rows = format
        values, scales = (dtype, size[axis], stride), (scale_format, block_rows, parts.get("tensor_scale"))
        return cls(parts["qdata"], parts["scale"], element, block_size, axis, *values, *scales)

    def _stable_hash_for_caching(self) -> str:
        """Return what torch.compile's caches must know of an input; without it they warn, and refuse symbolic sizes."""
        tensors: list[Tensor] = [self, *self.parts.values()]
        layouts = [(part.shape, part.stride()) for part in tensors]
        return str((self.__tensor_flatten__(), layouts, self.device, self.requires_grad))

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func in cls._ATEN_OP_TABLE[cls]:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if func._can_decompose():  # inference mode does not decompose operators before this call
            return func.decompose(*args, **kwargs or {})
        operand = next(x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, MXTensor))
        raise MXError(f"{func} is not defined for {operand.description}: dequantize it first, with .to_dtype()")


class _ToMX(torch.autograd.Function):
    """Quantization with a straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tensor_scale: Tensor | None,
        element: str,
        block_size: int,
        axis: int,
        scale_mode: str,
        rounding: str,
        scale_format: str,
        block_rows: int,
        seed: int | None,
    ) -> MXTensor:
        spec = MXSpec(element, block_size, axis, scale_mode, rounding, 8, 0, scale_format, block_rows)
        if spec.has_tensor_scale and tensor_scale is None:
            tensor_scale = tensor_scale_mx(x, spec)
        scale, qdata = quantize_mx(x, spec, seed=seed, tensor_scale=tensor_scale)
        # qdata has x's order, but tracing may know nothing of the symbols in its sizes; it knows x's sizes
        stride = dense_strides(x.shape, order_in_memory(x))
        t = None if tensor_scale is None else tensor_scale.detach()
        values, scales = (x.dtype, x.shape[spec.axis], stride), (spec.scale_format, spec.block_rows, t)
        return MXTensor(qdata, scale, spec.element, spec.block_size, spec.axis, *values, *scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad,) + (None,) * 9


class _FromMX(torch.autograd.Function):
    """Dequantization with the gradient of a cast."""

    @staticmethod
    def forward(ctx: Any, x: MXTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        # in the order of the codes: a matmul of transposed values then gives the bits of one of transposed plain
        # tensors
        return Dequantize(x.qdata, x.scale, x.spec, dtype, x.shape[x.axis], x.tensor_scale).call()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


# torch.compile takes both as one call each, and traces them below autograd
@torch.compiler.allow_in_graph
def _quantized(x: Tensor, *args: Any) -> MXTensor:
    return _ToMX.apply(x, *args)


@torch.compiler.allow_in_graph
def _dequantized(x: MXTensor, dtype: torch.dtype) -> Tensor:
    if dtype not in HIGH_PRECISION:
        raise MXError(f"to_dtype: cannot dequantize to {dtype}: allowed are float32, float16 and bfloat16")
    return _FromMX.apply(x, dtype)


def _of_lists(data: list | tuple) -> Tensor:
    try:
        return torch.as_tensor(data, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MXError(f"to_mx: nested lists of equal lengths that hold numbers are an array: {error}") from None
