"""Native runs: how Python enters them, what they hold, and the code that drives their kernels."""
