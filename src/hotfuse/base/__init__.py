"""What every other package may use: errors, settings, events, call structures."""
