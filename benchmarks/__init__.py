"""Speed is measured here, side by side with the alternatives; correctness is tested in `tests/`."""
