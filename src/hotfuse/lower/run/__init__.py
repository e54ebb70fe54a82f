"""A run of kernels as plain data: its steps, where values lie, the words and constants it reads. Every back end links it itself."""
