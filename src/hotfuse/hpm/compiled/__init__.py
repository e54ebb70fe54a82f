"""The performance model's native evaluation: a batch of candidates in microseconds."""
