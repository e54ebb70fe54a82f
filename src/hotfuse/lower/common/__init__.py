"""What lowering for every target shares: sizes, positions, values, kernels with how they are called."""
