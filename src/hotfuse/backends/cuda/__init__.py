"""CUDA devices: graphs of library kernels, recorded beside serving and replayed by calls of the same shapes."""
