"""Kernels for GPUs: groups of a graph compiled in workers, tried on the device, put into one plan with library kernels."""
