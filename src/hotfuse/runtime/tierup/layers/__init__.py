"""Layers of plans: one specialization a file, and what composes them."""
