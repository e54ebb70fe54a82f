"""Back ends: partition in, callable artifact out."""
