"""Tile kernels as they are, run by the interpreter: a back end to check others with."""
