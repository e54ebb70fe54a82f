"""Integers of a file stay integers before compiled code is there: quantized layers through the library's integer kernels.

`storage` goes to and from bytes in few passes, `layers` are products and convolutions of bytes, `qdq` finds them in files that
spell them out, `tables` are functions of one byte.
"""
