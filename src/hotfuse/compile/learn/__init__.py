"""What the performance model learns from, in workers: measurements, calibration, promises that came true."""
