"""Lowering for CPUs: loops, vectors, caches, and how work is divided among threads."""
