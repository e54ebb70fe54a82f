"""What the demonstration shows: lines of print to read, the record of a run, its live view and its report."""
