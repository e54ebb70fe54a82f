"""What we run on: CPU features that really execute, topology, fingerprint."""
