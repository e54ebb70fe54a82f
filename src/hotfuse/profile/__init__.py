"""What was seen: samples of real calls, what they add up to, and the store that keeps it."""
