"""Configurations of other frameworks, read as constraints: one file per source."""

from autopar.imports.imported import Imported, Remark
from autopar.imports.read import SOURCES, read_config

__all__ = ["SOURCES", "Imported", "Remark", "read_config"]
