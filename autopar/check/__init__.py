"""Will a configuration of another framework fit, how long is its step, what to change first."""

from autopar.check.report import Report, check

__all__ = ["Report", "check"]
