"""Explicit programs: forward and backward of a stage as graphs that passes rewrite."""
