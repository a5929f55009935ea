"""Tracing: a `torch.nn.Module` to a frozen graph."""

from autopar.trace.custom import CustomFunction, Slot
from autopar.trace.tracer import Traced, trace

__all__ = ["CustomFunction", "Slot", "Traced", "trace"]
