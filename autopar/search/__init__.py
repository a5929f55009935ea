"""The search: everything a plan can choose, at once, with a proof of how good the choice is."""
