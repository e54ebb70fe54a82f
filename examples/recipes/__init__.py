"""Programs as people write them, each served with one changed line."""
