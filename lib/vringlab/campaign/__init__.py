"""Experiments, plans, and the runner that turns cells into samples."""
