"""How ops are carried out: the assumptions about software under which a graph is priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["auto", "cpu", "flash", "efficient", "unfused"]
LossKernel = Literal["torch", "fused"]
DropoutKernel = Literal["counter", "native"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Which kernels do the work, as far as work and memory depend on it.

    The defaults are what this package's runtime does on a CPU; `CUDA` is what it does there.

    Attributes:
        device: Decides what ``auto`` means and the dtype of statistics: float32 on ``"cuda"``, that
            of the input on ``"cpu"``.
        attention: ``flash`` and ``efficient`` keep the log of the sum of exponentials instead of
            scores (as does ``cpu``); ``unfused`` multiplies, masks and takes the softmax in three
            kernels and keeps the probabilities, as Megatron-LM without flash attention does.
            ``auto`` is torch's choice: on CUDA flash for half precision without a mask and heads
            of at most 256 features, else efficient.
        loss: ``torch`` keeps log-probabilities; ``fused`` keeps the logits and one number per row
            and writes their gradient over them (flash-attn's cross entropy).
        dropout: ``counter`` computes masks from positions, one op after the other; ``native`` is
            one kernel.
        dropout_mask_bytes: Bytes per element of a mask that is kept; 0 if backward draws it again.
        fused_rms_norm: Whether an RMS norm is one kernel; else a sequence of ops.
        compiled: Whether neighbouring pointwise ops and reductions run as one kernel.
        recompute_fused: Whether what such kernels make is computed again in backward (as
            torch.compile's partitioner does) unless a matrix product or attention made it.
        regather: Whether what is gathered for an op is gathered again in backward instead of kept
            (Megatron-LM's sequence parallelism, arXiv 2205.05198, section 4.2.2; fully sharded
            parameters).
    """

    device: Literal["cpu", "cuda"] = "cpu"
    attention: AttentionKernel = "auto"
    loss: LossKernel = "torch"
    dropout: DropoutKernel = "counter"
    dropout_mask_bytes: int = 1
    fused_rms_norm: bool = False
    compiled: bool = False
    recompute_fused: bool = False
    regather: bool = False

    def attention_kernel(self, dtype: str, head_dim: int, masked: bool) -> str:
        """The attention kernel that takes queries of `dtype` and `head_dim`."""
        if self.attention != "auto":
            return self.attention
        if self.device == "cpu":
            return "cpu"
        # ``sdp_utils.cpp`` in ATen; the limit of 256 features is that of the flash kernel.
        half = dtype in ("float16", "bfloat16")
        return "flash" if half and not masked and head_dim <= 256 else "efficient"

    def statistics_dtype(self, dtype: str) -> str:
        """Dtype of the statistics that a norm of a `dtype` tensor keeps."""
        return "float32" if self.device == "cuda" and dtype in ("float16", "bfloat16") else dtype


CPU = Implementation()
CUDA = Implementation(device="cuda", fused_rms_norm=True)
