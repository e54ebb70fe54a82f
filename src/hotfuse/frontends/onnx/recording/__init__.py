"""Runs of a file's programs that come again with the same sizes: recorded once, with what sizes decide computed."""
