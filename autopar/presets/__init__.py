"""Published models as ordinary modules, by name: what plans and prices are tried on."""

from autopar.presets.config import DecoderConfig
from autopar.presets.registry import PRESETS, Preset, build, build_decoder, find, similar

__all__ = ["PRESETS", "DecoderConfig", "Preset", "build", "build_decoder", "find", "similar"]
