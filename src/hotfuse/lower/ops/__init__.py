"""Rows of ops: how each becomes instructions, or which element of an operand it reads."""
