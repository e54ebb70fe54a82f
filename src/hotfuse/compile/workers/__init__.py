"""Worker processes: how they are started, asked, shared, paused and ended."""
