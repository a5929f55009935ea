"""Everything that touches torch at run time: lowering, collectives, launching, training."""
