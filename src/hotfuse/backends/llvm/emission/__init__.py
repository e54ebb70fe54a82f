"""Tile kernels as LLVM IR: one emission per instruction."""
