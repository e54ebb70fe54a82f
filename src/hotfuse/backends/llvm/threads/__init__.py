"""Threads in native code: teams, forks, and how they meet."""
