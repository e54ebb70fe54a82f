"""The performance model of devices: what a generated kernel takes there, predicted before it is compiled."""
