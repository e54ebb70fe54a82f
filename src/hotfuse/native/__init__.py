"""Native code that reads Python's and torch's own objects: guards, what publishes and watches. It is below every target.

Nothing here knows tile kernels: text of LLVM IR in, functions of Python out.
"""
