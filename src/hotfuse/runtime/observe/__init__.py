"""Looking at calls that are served: samples, clocks, findings, and telling what was found."""
