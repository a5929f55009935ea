"""The model that a configuration describes, with a batch to trace it, on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cost_models.software import stack
from autopar.imports.imported import Described, Imported
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import Preset, build, build_decoder

if TYPE_CHECKING:
    from torch import nn

DEFAULT_SEQ = 2048


def described_model(
    setting: Imported, model: Described, batch: int, seq: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a model as a framework's software has it.

    Args:
        setting: The configuration.
        model: What it says of the model.
        batch: Samples of a step.
        seq: Tokens of a sample.

    Returns:
        ``(model, args, kwargs)``; the model returns its loss.
    """
    if not isinstance(model.sizes, DecoderConfig):
        preset = Preset(
            name=model.name, family=model.kind, sizes=model.sizes, batch=batch, seq=seq,
            params=0.0, source=setting.where,
        )  # fmt: skip
        return build(preset)
    config, software = model.sizes, stack(setting.stack)
    # Halves of a fused gate are products of their own where ranks share them: the strategy would
    # keep the fused one whole on every rank.
    fused = software.fused_gate and setting.tp == 1
    config = replace(config, fused_qkv=software.fused_qkv, fused_gate=fused)
    if config.positions == "learned":
        config = replace(config, context=max(config.context, seq))
    dtype = "float32" if setting.precision == "fp32" else "bfloat16"
    return build_decoder(config, batch=batch, seq=seq, dtype=dtype)
