"""One unit of compilation in the worker: a group from nodes to a kernel that was tried."""
