"""Convolutions for CPUs."""
