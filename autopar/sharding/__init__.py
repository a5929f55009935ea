"""What every dim is, and how each operator may be split."""
