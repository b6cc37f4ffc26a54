"""Call an implementation with arrays of its framework, and read its results: values, or codes and scale bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mx_conformance.conventions import PACKINGS, Claim
from mx_conformance.errors import MXError
from mx_conformance.exact import code_values

if TYPE_CHECKING:
    import torch

#: values that share a scale: the block of every format of the specification (section 5.2)
BLOCK = 32
_FORMS = (
    "quantize must return either dequantized values, a float array in the shape of its input, or a pair (scale, "
    "codes): E8M0 bytes of shape (rows, ceil(n / 32)) and codes of shape (rows, bytes), both of one byte an item"
)


@dataclass(frozen=True)
class Output:
    """The results of an implementation for rows of values.

    Args:
        values: (rows, n) float64, dequantized.
        scale: (rows, blocks) uint8, or None if the implementation returns values.
        data: (rows, bytes) uint8, packed codes, or None.
    """

    values: NDArray[np.float64]
    scale: NDArray[np.uint8] | None = None
    data: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Subject:
    """An implementation under test.

    Args:
        quantize: (x (rows, n) float32) -> values, or (scale, codes); None if there is only `dequantize`.
        dequantize: (codes, scale) -> values (rows, n); or None.
        framework: "torch" or "numpy", whose arrays it takes.
        dtype: "float32" or, for torch, "bfloat16".
    """

    quantize: Callable[[Any], Any] | None
    dequantize: Callable[[Any, Any], Any] | None
    framework: str
    dtype: str = "float32"

    def rounded(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the nearest finite values of the dtype of the inputs."""
        if self.dtype == "float32":
            return x
        import torch  # here: implementations in NumPy run without it

        finite = torch.from_numpy(x).clamp(torch.finfo(torch.bfloat16).min, torch.finfo(torch.bfloat16).max)
        return np.asarray(finite.bfloat16().float().numpy())

    def run(self, x: NDArray[np.float32], claim: Claim) -> Output:
        """Quantize rows of values. Decode stored codes by the tables of the specification, not by `dequantize`.

        Raises:
            MXError: for results of another form.
        """
        if self.quantize is None:
            raise MXError("there is no quantize to run: pass one, or check dequantize alone")
        array = self._array(x)
        result = self.quantize(array if self.dtype == "float32" else array.bfloat16())
        if not isinstance(result, tuple | list):
            values = _to_numpy(result)
            if values.shape != x.shape or values.dtype.kind != "f":
                raise MXError(f"{_FORMS}; for x of shape {x.shape} it returned {_described(result)}")
            return Output(values.astype(np.float64))
        if len(result) != 2:
            raise MXError(f"{_FORMS}; it returned {len(result)} results")
        scale, data = (_bytes(part) for part in result)
        if scale is not None and data is not None and scale.shape == (len(x), -(-x.shape[1] // BLOCK)):
            if fits(data, claim, x.shape):
                return Output(decode(scale, data, claim, x.shape[1]), scale, data)
        described = " and ".join(_described(part) for part in result)
        raise MXError(f"{_FORMS}; for x of shape {x.shape} it returned {described}")

    def decode(self, data: NDArray[np.uint8], scale: NDArray[np.uint8], n: int) -> NDArray[np.float64]:
        """Dequantize rows of codes by the implementation.

        Raises:
            MXError: for results of another form.
        """
        if self.dequantize is None:
            raise MXError("there is no dequantize to run: pass one, or check quantize alone")
        result = self.dequantize(self._array(data), self._array(scale))
        values = _to_numpy(result)
        if values.shape != (len(data), n) or values.dtype.kind != "f":
            raise MXError(
                f"dequantize(codes, scale) must return a float array of shape {(len(data), n)} for codes of shape "
                f"{data.shape} and scales of shape {scale.shape}; it returned {_described(result)}"
            )
        return values.astype(np.float64)

    def _array(self, array: NDArray[Any]) -> Any:
        """Return a copy, which the implementation may change, as an array of its framework."""
        if self.framework == "numpy":
            return array.copy()
        import torch

        return torch.from_numpy(array.copy())


def fits(data: NDArray[np.uint8], claim: Claim, shape: tuple[int, ...]) -> bool:
    """Return whether the shape of data is that of codes of values of a shape (rows, n)."""
    rows, n = shape
    if data.ndim != 2 or len(data) != rows or data.shape[1] * 8 < n * claim.element.bits:
        return False
    return _packing(data, claim, n) != "halves" or data.shape[1] % (BLOCK // 2) == 0


def decode(scale: NDArray[np.uint8], data: NDArray[np.uint8], claim: Claim, n: int) -> NDArray[np.float64]:
    """Return the values (rows, n) of codes by the tables of the specification (sections 5.1, 5.3 and 5.4.1)."""
    codes = PACKINGS[_packing(data, claim, n)].unpack(data, claim.element.bits)[:, :n]
    factors = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan)  # of the scale bytes
    elements = np.array(code_values(claim.element))[codes & (2**claim.element.bits - 1)]
    return np.asarray(elements * factors[scale].repeat(BLOCK, -1)[:, :n])


def _packing(data: NDArray[np.uint8], claim: Claim, n: int) -> str:
    """Return the packing by which to read data: a byte for each of n narrow codes is that, whatever the claim."""
    return "bytes" if data.shape[-1] == n > 3 and claim.element.bits < 8 else claim.packing or "low_first"


def _is_tensor(result: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a result is a tensor of torch. Where nothing has imported torch, there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(result, torch.Tensor)


def _to_numpy(result: Any) -> NDArray[Any]:
    """Return a result as a NumPy array; bfloat16, which NumPy lacks, as float32."""
    if _is_tensor(result):
        result = result.detach().cpu()
        return np.asarray((result.float() if str(result.dtype) == "torch.bfloat16" else result).numpy())
    array = np.asarray(result)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _bytes(result: Any) -> NDArray[np.uint8] | None:
    """Return the bytes of an array of a one-byte dtype; None of another."""
    if _is_tensor(result):
        if result.element_size() != 1:
            return None
        return np.asarray(result.detach().cpu().contiguous().view(sys.modules["torch"].uint8).numpy())
    array = np.asarray(result)
    return np.ascontiguousarray(array).view(np.uint8) if array.dtype.itemsize == 1 and array.dtype != bool else None


def _described(result: Any) -> str:
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    return type(result).__name__ if shape is None else f"{dtype} of shape {tuple(shape)}"
