"""Matrix products for CPUs."""
