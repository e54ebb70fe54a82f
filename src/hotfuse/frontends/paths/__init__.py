"""Paths through a model's Python that data decide: recorded in real calls, followed while tracing, checked in the graph."""
