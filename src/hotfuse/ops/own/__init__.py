"""Operators of torch that are our own, for what no operator of torch says in one."""
