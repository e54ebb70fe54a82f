"""What the data of calls never need is never computed: one module a case, each against eager, peers and our plan without it."""
