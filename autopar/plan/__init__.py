"""The plan: choices, predictions and their file form."""
