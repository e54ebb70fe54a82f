"""Integers of a file stay integers before compiled code is there: quantized layers through the library's integer kernels.

`storage` goes to and from bytes in few passes, `layers` are products and convolutions of bytes, `native_layers` the same in the
code that every file shares. `qdq` finds them in files that spell them out, `float_ends` has them take neighbours in, `dynamic`
are layers that are quantized in every call, `tables` are functions of one byte, `sums` of two.
"""
