"""What a framework can be told: which changes and which plans may be proposed to its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.imports.imported import Imported

_FREE: tuple[bool, ...] = (False, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """What configurations of a framework can say.

    Attributes:
        degrees: Kinds of parallelism beside that of data: ``pp``, ``tp``.
        zeros: ZeRO stages.
        schedules: Schedules of pipelines.
        recomputes: What backward may compute again.
        sequence: Whether tensor ranks split norms and shortcuts by tokens: the values to choose of.
    """

    degrees: frozenset[str] = frozenset()
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = ("1f1b",)
    recomputes: tuple[str, ...] = ("none", "full")
    sequence: tuple[bool, ...] = _FREE

    def says(self, now: Imported, then: Imported) -> bool:
        """Whether a configuration can be changed so.

        What both have alike is not looked at: the file has said it.

        Args:
            now: The configuration.
            then: What it would become.
        """
        return all(
            getattr(now, name) == getattr(then, name) or fine
            for name, fine in (
                ("pp", "pp" in self.degrees),
                ("tp", "tp" in self.degrees),
                ("zero", then.zero in self.zeros),
                ("schedule", then.schedule in self.schedules),
                ("recompute", (then.recompute or "none") in self.recomputes),
                ("sequence_parallel", then.tp == 1 or then.sequence_parallel in self.sequence),
            )
        )

    def allowed(self, num_devices: int) -> dict[str, tuple[object, ...]]:
        """Fields of points of the search with the values that the framework has words for.

        Args:
            num_devices: Devices of the cluster.
        """
        free = range(1, num_devices + 1)
        roles = [name for flag, name in ((False, "megatron"), (True, "megatron_sp"))
                 if flag in self.sequence]  # fmt: skip
        return {
            "pipeline": tuple(free) if "pp" in self.degrees else (1,),
            "tensor": tuple(free) if "tp" in self.degrees else (1,),
            "role": ("", *roles),
            "zero": self.zeros,
            "schedule": self.schedules,
        }


_BOTH = frozenset({"pp", "tp"})
_MEGATRON = Language(
    degrees=_BOTH, zeros=(0, 1), schedules=("1f1b", "interleaved_1f1b"),
    recomputes=("none", "attention", "full"),
)  # fmt: skip
_TORCHTITAN = Language(
    degrees=_BOTH, zeros=(2, 3), schedules=("1f1b", "interleaved_1f1b", "gpipe", "zbv"),
    recomputes=("none", "attention", "selective", "ops", "full"), sequence=(True,),
)  # fmt: skip
_DEEPSPEED = Language(degrees=frozenset({"tp"}), sequence=(False,))
LANGUAGES: Mapping[tuple[str, str], Language] = {
    ("megatron", ""): _MEGATRON,
    # Its engine runs pipelines as 1F1B, and divides optimizer state at most beside them.
    ("megatron", "deepspeed-pipeline"): Language(
        degrees=_BOTH, zeros=(0, 1), recomputes=("none", "full"), sequence=(False,)
    ),
    ("torchtitan", ""): _TORCHTITAN,
    ("deepspeed", ""): _DEEPSPEED,
    ("accelerate", "torchtitan"): Language(
        degrees=frozenset({"tp"}), zeros=(0, 2, 3), sequence=(False,)
    ),
    ("accelerate", "deepspeed-hf"): Language(sequence=(False,)),
    ("accelerate", "mcore"): Language(
        degrees=_BOTH, zeros=(0, 1), recomputes=("none", "attention")
    ),
}
"""By framework, and by software stack where that decides (``""``: any)."""


def language_of(setting: Imported) -> Language:
    """What the framework of a configuration can be told.

    Args:
        setting: The configuration.
    """
    found = LANGUAGES.get((setting.source, setting.stack)) or LANGUAGES[setting.source, ""]
    if setting.zero not in found.zeros:  # Megatron-FSDP, or ZeRO of DeepSpeed: the file has words
        return replace(found, zeros=(0, 1, 2, 3))
    return found
