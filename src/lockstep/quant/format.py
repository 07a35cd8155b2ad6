"""What a low-bit format is: how weights and inputs are encoded, and the product that runs on the codes.

Each is a file in `formats/`. A weight is [out, in] or, for the fused experts of a mixture, [experts, out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.inputs import EncodedInput, Input, InputCode, Rows, checked
from lockstep.quant.kernels import Kernel, choose, decode, encode
from lockstep.quant.scheme import Scheme


class Format(ABC):
    """Nothing here has a gradient; training goes through `lockstep.quant.straight_through`."""

    bits: ClassVar[int]
    """of a weight's code"""

    @property
    @abstractmethod
    def operation(self) -> str:
        """The product on codes, by its name in `kernels/reference.py`, which defines it."""

    @property
    @abstractmethod
    def input_code(self) -> InputCode | None:
        """What inputs are encoded in; None: they stay in the compute dtype."""

    @property
    def batch_invariant(self) -> bool:
        """Whether on a GPU a row's product is the same bits, whatever rows are computed with it."""
        return False

    @property
    @abstractmethod
    def scheme(self) -> Scheme | None:
        """Its form as a compressed-tensors checkpoint, if both vLLM and transformers load one."""

    @abstractmethod
    def encode_weight(self, weight: Tensor) -> Encoded:
        """Made from the master weight, in its own dtype. NaN or inf shows in the scales: see `Encoded.finite`."""

    def quantize(self, weight: Tensor) -> Encoded:
        """`encode_weight`, or ValueError for NaN or inf. Waits for the device."""
        encoded = self.encode_weight(weight)
        if not encoded.finite:
            raise ValueError(f"cannot quantize a weight {tuple(weight.shape)} that holds NaN or inf")
        return encoded

    @abstractmethod
    def dequantize(self, weight: Encoded, dtype: torch.dtype) -> Tensor: ...

    def encode_input(self, x: Tensor) -> Input:
        """Rows [N, in]. ValueError for NaN or inf on a CPU. On a GPU asking would stall it: the row's scale, and with
        it the row's output, is then NaN or inf."""
        return (x,) if self.input_code is None else checked(encode(self.input_code.quantizer, x))

    def decode_input(self, x: Input, dtype: torch.dtype) -> Tensor:
        return x[0].to(dtype) if self.input_code is None else decode(self.input_code.dequantizer, *x, dtype)

    def matmul(self, x: Input, weight: Encoded, dtype: torch.dtype) -> Tensor:
        """x·Wᵀ [N, out]: the executed arithmetic."""
        return self.kernel(weight, dtype).run(*x, weight.codes, weight.scales, dtype)

    def grouped_matmul(self, x: Input, offsets: Tensor, weight: Encoded, dtype: torch.dtype) -> Tensor:
        """The same for experts: rows `offsets[e]:offsets[e + 1]` (int32 [experts + 1]) meet expert e's weight."""
        return self.kernel(weight, dtype).run(*x, offsets, weight.codes, weight.scales, dtype)

    def linear(self, x: Rows, weight: Encoded, bias: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out] in the dtype of x; the bias is added in that dtype, after the rounding to it."""
        y = self.matmul(self._rows(x), weight, x.dtype)
        y = y if bias is None else y + bias
        return y.unflatten(0, x.shape[:-1])

    def _rows(self, x: Rows) -> Input:
        if isinstance(x, EncodedInput):
            assert x.code == self.input_code, f"{self} cannot multiply an input in {x.code}"
            return checked(x.rows)
        return self.encode_input(x.flatten(0, -2))

    def grouped(self, x: Tensor, offsets: Tensor, weight: Encoded) -> Tensor:
        """Rows [N, in], sorted by expert, to [N, out]."""
        return self.grouped_matmul(self.encode_input(x), offsets, weight, x.dtype)

    def kernel(self, weight: Encoded, dtype: torch.dtype) -> Kernel:
        """What multiplies with `weight` where it lies; its name goes into the audit."""
        operation = f"grouped_{self.operation}" if len(weight.shape) == 3 else self.operation
        return choose(operation, weight.codes.device.type, weight.shape, dtype)
