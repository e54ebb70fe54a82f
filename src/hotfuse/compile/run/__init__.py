"""Native runs in the worker: kernels in order, where every value lies, and the code between them."""
