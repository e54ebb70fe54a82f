"""Input-driven specialization: what calls have in common becomes part of the program, behind a guard. One strategy a file."""
