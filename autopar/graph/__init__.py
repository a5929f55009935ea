"""The frozen, torch-free graph and its passes."""
