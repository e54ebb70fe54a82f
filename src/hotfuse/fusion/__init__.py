"""Which nodes run as one kernel."""
