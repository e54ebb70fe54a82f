"""Triton: tile kernels for GPUs, compiled in worker processes without a device and loaded through the driver."""
