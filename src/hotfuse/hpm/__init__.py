"""The hardware performance model: how long a kernel takes, predicted before it is built."""
