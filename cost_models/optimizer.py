"""What optimizers keep per parameter, and what an update needs besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.errors import InputError
from autopar.graph.ir import ITEM_BYTES
from autopar.registry import Registry

Loop = Literal["single", "foreach", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """Memory of an optimizer.

    Attributes:
        moments: Numbers kept per element of a parameter.
        moment_dtype: Their dtype; None for that of the parameter, as torch has it.
        master: Whether 16-bit parameters have a float32 copy that is updated.
        counter_bytes: Kept per parameter (or part of one) besides: torch's step counter.
        temporaries: Tensors of the size of a parameter that its update needs at a time.
        lingering: How many of them live until those of the next parameter are there.
        together: Tensors of the size of a parameter that each needs when all are updated at once.
        loop: ``single``: one parameter after the other. ``foreach``: all of them at once.
            ``fused``: no temporaries.
    """

    moments: int = 2
    moment_dtype: str | None = None
    master: bool = False
    counter_bytes: int = 4
    temporaries: int = 2
    lingering: int = 1
    together: int = 1
    loop: Loop = "single"

    def state_bytes(self, numel: int, dtype: str) -> int:
        """Bytes of moments and master copy of `numel` elements of a `dtype` parameter."""
        moment = ITEM_BYTES[self.moment_dtype or dtype]
        copy = 4 if self.master and ITEM_BYTES[dtype] == 2 else 0
        return numel * (self.moments * moment + copy)

    def update_bytes(self, sizes: Sequence[int]) -> int:
        """Most bytes of temporaries while parameters of these bytes are updated in order."""
        if self.loop == "fused":
            return 0
        if self.loop == "foreach":
            return self.together * sum(sizes)
        return max(
            (
                self.temporaries * size + self.lingering * before
                for before, size in zip((0, *sizes), sizes, strict=False)
            ),
            default=0,
        )


# Temporaries as measured on torch 2.13.
_SGD = OptimizerMemory(moments=0, counter_bytes=0, temporaries=0, lingering=0, together=0)
OPTIMIZERS = Registry[OptimizerMemory]("optimizer", error=InputError)
OPTIMIZERS.add("adamw", OptimizerMemory())
OPTIMIZERS.add("adam", OptimizerMemory())
OPTIMIZERS.add("nadam", OptimizerMemory(counter_bytes=8))
OPTIMIZERS.add("radam", OptimizerMemory(temporaries=5, lingering=0))
OPTIMIZERS.add("adamax", OptimizerMemory(temporaries=1, lingering=0))
OPTIMIZERS.add("sgd", _SGD)
OPTIMIZERS.add("momentum", replace(_SGD, moments=1))
OPTIMIZERS.add("adagrad", OptimizerMemory(moments=1, temporaries=1, together=2))
OPTIMIZERS.add("rmsprop", OptimizerMemory(moments=1, temporaries=1))
OPTIMIZERS.add("lion", OptimizerMemory(moments=1, counter_bytes=0, temporaries=1, lingering=0))
OPTIMIZERS.add("mixed_adamw", OptimizerMemory(moment_dtype="float32", master=True, counter_bytes=0))
"""Adam with float32 moments and master copies of 16-bit parameters: 12 bytes per parameter (ZeRO,
arXiv 1910.02054, section 3.1)."""
