"""Recurrent layers for CPUs."""
