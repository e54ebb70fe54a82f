"""Several kernels for one group: which there are, how they are tried, and which serves what."""
