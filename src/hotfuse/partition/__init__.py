"""The partition manager: which nodes run as one unit."""
