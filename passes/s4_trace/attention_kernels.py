"""attention_kernels: PyTorch's attention kernels on blocks of a chunk's attention, and which one takes given
operands.

A kernel attends from a chunk's rows to one block of columns. It returns the log-sum-exp as well, by which
blocks are merged, and its backward takes the merged output and log-sum-exp. `choose` is asked while a program
is traced, so the choice is fixed with the program.

NOTE [tested mostly without a GPU]: the CUDA kernels are tested by emulation of their ops on a CPU, after what
PyTorch's sources say of them, and on fake tensors. All of them have run on an H100 (docs/gpu.md,
tests/e2e/memory/test_cuda.py).

NOTE [cuDNN before flash]: where PyTorch itself prefers cuDNN, it is 1.3 to 1.9 times faster than PyTorch's
flash attention, on the blocks of a chunk too (H100, docs/gpu.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from .cudnn_blocks import BLOCK_ATTENTION, BLOCK_ATTENTION_BACKWARD, flash, flash_backward

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
LARGE_BLOCKS = 768  # query rows; see NOTE [rows for the kernel]
LSE_ROWS = 32  # the memory-efficient kernel pads its log-sum-exp to a multiple of these
BIAS_COLUMNS = 16  # rows of a bias begin at multiples of these elements, as PyTorch lays them out

CUDNN_FROM = 91501  # 9.15.1

Result = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class AttentionBlock:
    """Rows and the columns that they attend to.

    Attributes:
        query: (B, H, c, D), float.
        key: (B, H or fewer, n, D), in the dtype of the query. With fewer heads, each is shared by a group of
            consecutive query heads.
        value: (B, as key, n, Dv), likewise.
        bias: added to the scores, as made by the `bias` of the kernel; (B, H, c, n) or what broadcasts to it.
        causal: there are as many columns as rows, and row i attends to the columns up to i; without a bias.
        scale: of the scores; None: D to the power of -1/2.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    causal: bool = False
    scale: float | None = None

    @property
    def groups(self) -> int:
        """How many query heads share a head of the keys."""
        return self.query.shape[1] // self.key.shape[1]


class Kernel:
    """One kernel, forwards and backwards, on one block of columns.

    Attributes:
        by_autograd: PyTorch differentiates what `forward` calls.
    """

    by_autograd = True

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """True if the kernel takes these operands; without a mask, also as causal blocks.

        Args:
            query, key, value: with shapes and dtypes as in `Block`; only those and the device are looked at.
            mask: bool or float, (B, H, c, n) or what broadcasts to it; None: every row reads every column.
        """
        raise NotImplementedError

    def bias(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """A mask (bool, or added to the scores) as the bias of a block, of two dims or four."""
        bias = additive(mask, query)
        return bias if bias is None or bias.dim() in (2, 4) else bias[(None,) * (4 - bias.dim())]

    def stacked(self, query: Tensor, key: Tensor) -> int:
        """How many query heads of a group to hand over as rows of one head, where all read the same columns.

        Args:
            query, key: with shapes as in `Block`.
        """
        return query.shape[1] // key.shape[1]

    def forward(self, block: AttentionBlock) -> Result:
        """Output (B, H, c, Dv) in the dtype of the query, and log-sum-exp (B, H, c), float32 or wider."""
        raise NotImplementedError

    def backward(self, gradient: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of query, key and value, each in the shape and dtype of its operand.

        Args:
            gradient: of the output, (B, H, c, Dv), in the dtype of the query.
            block: whose part of the gradients is wanted.
            out: the output over all blocks, likewise.
            lse: the log-sum-exp over all blocks, (B, H, c), float32 or wider.
        """
        raise NotImplementedError


def additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as the number that is added to the scores, in the dtype of the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(like.dtype)
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(mask.logical_not(), float("-inf"))


class CpuFlash(Kernel):
    """PyTorch's flash attention for CPUs: float dtypes, grouped heads, a bias.

    NOTE [rows for the kernel]: without a mask, query heads that share keys may as well be further rows of one
    head. PyTorch's CPU kernel works on blocks of 256 rows if it gets 768 or more, and of 64 or fewer below
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp), so for short chunks this is faster; the result is the
    same to the bit. The number of rows is that of the chunk that the program is traced for: it decides on
    speed alone, so it makes no condition on other chunks.
    """

    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    op_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """On a CPU, with four dims and one head size, in a floating-point dtype."""
        same = query.shape[-1] == key.shape[-1] == value.shape[-1]
        kinds = (torch.float32, torch.float64, *HALF)
        return query.device.type == "cpu" and query.dim() == 4 and same and _dtype(query, key, value) in kinds

    def stacked(self, query: Tensor, key: Tensor) -> int:
        """How many query heads become rows of one head: those of a group if the chunk is short, else one."""
        rows = query.shape[2]
        rows = rows if isinstance(rows, int) else int(rows.node.hint)
        return super().stacked(query, key) if rows < LARGE_BLOCKS else 1

    def forward(self, block: AttentionBlock) -> Result:
        """Output and log-sum-exp, as in `Kernel`."""
        operands = (block.query, block.key, block.value)
        return self.op(*operands, 0.0, block.causal, attn_mask=block.bias, scale=block.scale)

    def backward(self, gradient: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of query, key and value, as in `Kernel`."""
        operands = (gradient, block.query, block.key, block.value, out, lse)
        return self.op_backward(*operands, 0.0, block.causal, attn_mask=block.bias, scale=block.scale)


class CudaFlash(Kernel):
    """Flash attention on CUDA: half precision, grouped heads, no mask.

    Heads are stacked all the same: given groups, the backward of the kernel first makes gradients of keys and
    values for each query head, as long as the block.
    """

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """On CUDA without a mask, in half precision with heads up to 256, where flash attention runs."""
        if mask is not None or not _on_cuda(query, key, value):
            return False
        return _half_heads(query, key, value, 256) and _flash_runs(query.device, query.shape[-1])

    def forward(self, block: AttentionBlock) -> Result:
        """Output and log-sum-exp, as in `Kernel`."""
        return flash(block.query, block.key, block.value, block.causal, block.scale)

    def backward(self, gradient: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of query, key and value, as in `Kernel`."""
        operands = (gradient, block.query, block.key, block.value, out, lse)
        return flash_backward(*operands, block.causal, block.scale)


class CudaCudnn(Kernel):
    """cuDNN's attention on CUDA: half precision, no mask, grouped heads; see `cudnn_blocks`.

    Heads are stacked where they can be, as for `CudaFlash`.

    NOTE [log-sum-exp of cuDNN]: natural logarithms of sums over scaled scores, as other kernels have them, of
    shape (B, H, c, 1) since PyTorch 2.9. PyTorch too merges blocks by it, and hands the merged one to the
    backward of each block (torch/distributed/tensor/experimental/_context_parallel).
    """

    by_autograd = False

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """On CUDA without a mask, in half precision with heads up to 128, where cuDNN is preferred."""
        if mask is not None or not _on_cuda(query, key, value):
            return False
        return _half_heads(query, key, value, 128) and _cudnn_runs(query.device)

    def forward(self, block: AttentionBlock) -> Result:
        """Output and log-sum-exp, as in `Kernel`."""
        return BLOCK_ATTENTION(block.query, block.key, block.value, block.causal, block.scale)

    def backward(self, gradient: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of query, key and value, as in `Kernel`."""
        operands = (gradient, block.query, block.key, block.value, out, lse)
        return BLOCK_ATTENTION_BACKWARD(*operands, block.causal, block.scale)


class CudaEfficient(Kernel):
    """Memory-efficient attention on CUDA: half precision and float32, a bias; grouped heads are repeated.

    NOTE [layouts that are not checked]: the backward takes the output to lie in memory as (B, c, H, Dv), and
    reads the log-sum-exp up to a multiple of 32 rows, infinite in those that there are not. A kept output
    comes back in the layout it was stored in, so it is copied whatever layout the trace has seen.

    NOTE [slices that are never whole]: whether a slice is contiguous is asked while tracing, and would be a
    condition on the number of rows or columns. So what is padded is always wider than what it holds, and rows
    of the kernel's own log-sum-exp are taken by index.
    """

    op = aten._scaled_dot_product_efficient_attention.default
    op_backward = aten._scaled_dot_product_efficient_attention_backward.default

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """On CUDA, where memory-efficient attention is enabled and takes the dtype and the head sizes."""
        if not _on_cuda(query, key, value) or not torch.backends.cuda.mem_efficient_sdp_enabled():
            return False
        dtype = _dtype(query, key, value)
        aligned = 8 if dtype in HALF else 4
        fits = query.shape[-1] == key.shape[-1] and all(x.shape[-1] % aligned == 0 for x in (key, value))
        runs = dtype != torch.bfloat16 or _capability(query.device) >= (8, 0)
        return fits and dtype in (torch.float32, *HALF) and runs

    def bias(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """(B, H, c, n), aligned rows, repeated without a copy over what the mask does not tell apart."""
        if mask is None:
            return None
        rows, columns = query.shape[2], key.shape[2]
        outer = (*(1,) * (4 - mask.dim()), *mask.shape[:-2])
        width = _wider(columns, BIAS_COLUMNS)
        bias = torch.zeros((*outer, rows, width), dtype=query.dtype, device=query.device)
        bias = bias.narrow(3, 0, columns)
        if mask.dtype == torch.bool:
            bias.masked_fill_(mask.logical_not(), float("-inf"))
        else:
            bias.copy_(mask)
        return bias.expand(query.shape[0], query.shape[1], rows, columns)

    def forward(self, block: AttentionBlock) -> Result:
        """Output and log-sum-exp, as in `Kernel`; the rows that the kernel pads the sums with are cut off."""
        query, key, value = _ungrouped(block)
        out, lse, *_ = self.op(query, key, value, block.bias, True, 0.0, block.causal, scale=block.scale)
        return out, lse.index_select(2, torch.arange(query.shape[2], device=lse.device))

    def backward(self, gradient: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of query, key and value, as in `Kernel`."""
        query, key, value = _ungrouped(block)
        out = out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        rows = query.shape[2]
        padded = (*lse.shape[:2], _wider(rows, LSE_ROWS))
        sums = torch.full(padded, math.inf, dtype=lse.dtype, device=lse.device)
        sums.narrow(2, 0, rows).copy_(lse)
        state = torch.empty((), dtype=torch.int64, device=lse.device)  # of dropout, so not read
        operands = (gradient, query, key, value, block.bias, out, sums, state, state)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = self.op_backward(*operands, 0.0, wanted, block.causal, scale=block.scale)
        return dq, *_regrouped(block, dk, dv)


KERNELS: tuple[Kernel, ...] = (CpuFlash(), CudaCudnn(), CudaFlash(), CudaEfficient())


def choose(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, by_autograd: bool = False
) -> Kernel | None:
    """The first kernel that takes these operands; None: attention goes the plain way.

    Args:
        query, key, value: with shapes and dtypes as in `Block`.
        mask: bool or float, (B, H, c, n) or what broadcasts to it; None: every row reads every column.
        by_autograd: it has to be one that PyTorch differentiates.
    """
    kernels = (k for k in KERNELS if k.by_autograd or not by_autograd)
    return next((k for k in kernels if k.applies(query, key, value, mask)), None)


def _dtype(*operands: Tensor) -> torch.dtype | None:
    """The dtype of all operands, if it is one."""
    dtypes = {x.dtype for x in operands}
    return dtypes.pop() if len(dtypes) == 1 else None


def _half_heads(query: Tensor, key: Tensor, value: Tensor, limit: int) -> bool:
    """True for heads in half precision, all of one size, a multiple of 8 up to a limit."""
    size = query.shape[-1]
    fits = size == key.shape[-1] == value.shape[-1] and size % 8 == 0 and size <= limit
    return fits and _dtype(query, key, value) in HALF


def _on_cuda(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True for operands of NVIDIA's devices whose heads are in groups and whose last dim is dense.

    AMD's devices, which PyTorch calls by the same name, have other kernels behind the same ops.
    """
    if query.device.type != "cuda" or torch.version.hip is not None or query.dim() != 4:
        return False
    heads = key.shape[1]
    dense = all(x.stride(-1) == 1 for x in (query, key, value))
    return dense and heads == value.shape[1] and query.shape[1] % heads == 0


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; without a device, for a program that is not run, that of the first that has all."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 0)


def _flash_runs(device: torch.device, size: int) -> bool:
    """True if the flash kernel and its backward run on a device for a head size, and are not switched off.

    These are PyTorch's own conditions (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    settings = torch.backends.cuda
    built = settings.is_flash_attention_available() or not torch.cuda.is_available()
    capability = _capability(device)
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    too_large = small and 192 < size <= 224
    return settings.flash_sdp_enabled() and built and capability >= (8, 0) and not too_large


def _cudnn_runs(device: torch.device) -> bool:
    """True where cuDNN's kernel and its backward are right, are not switched off, and are the faster ones.

    These are PyTorch's own conditions (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Versions before
    9.15.1 lack a fix for lengths that 128 does not divide. Elsewhere it is taken if flash is switched off.
    """
    settings, version = torch.backends.cuda, cudnn_version()
    runs = _capability(device) >= (8, 0) and version is not None and version >= CUDNN_FROM
    wanted = not settings.flash_sdp_enabled() or _cudnn_is_preferred(device)
    return settings.cudnn_sdp_enabled() and runs and wanted


def _cudnn_is_preferred(device: torch.device) -> bool:
    """True if PyTorch takes cuDNN for attention that flash attention takes as well, asked for a small one."""
    if not torch.cuda.is_available():
        return False
    with _disable_current_modes():
        small = torch.empty((1, 1, 8, 64), dtype=torch.bfloat16, device=device)
        return torch._fused_sdp_choice(small, small, small) == SDPBackend.CUDNN_ATTENTION.value


def cudnn_version() -> int | None:
    """Version of cuDNN as a number, 91501 for 9.15.1; None: there is none.

    Without CUDA the program is not run, and the answer is a version that will do.
    """
    return torch.backends.cudnn.version() if torch.cuda.is_available() else CUDNN_FROM


def _wider(size: int, multiple: int) -> int:
    """The next multiple above a size; written so that it is seen to be above for every size."""
    return size + multiple - size % multiple


def _ungrouped(block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, all with the heads of the query."""
    if block.groups == 1:
        return block.query, block.key, block.value
    key, value = (x.repeat_interleave(block.groups, 1) for x in (block.key, block.value))
    return block.query, key, value


def _regrouped(block: AttentionBlock, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Gradients of repeated heads as those of the heads themselves."""
    if block.groups == 1:
        return gradients
    return tuple(x.unflatten(1, (-1, block.groups)).sum(2) for x in gradients)
