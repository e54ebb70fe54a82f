"""Machine code for tile kernels through LLVM: emission, targets, compiling, loading and calling."""
