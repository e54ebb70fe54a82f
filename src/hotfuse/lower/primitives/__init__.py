"""Composite ops in terms of a few: one rule per op."""
