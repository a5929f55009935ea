"""``python -m autopar`` is the command `autopar`."""

from autopar.cli.main import entry

entry()
