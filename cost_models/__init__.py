"""Hardware, and what choices cost on it."""
