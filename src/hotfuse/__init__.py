"""Hotfuse: a tiered, profile-guided JIT for neural-network inference."""
