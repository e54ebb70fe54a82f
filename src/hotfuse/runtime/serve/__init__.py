"""Serving a call: guards, dispatch, plans of native runs, and what a call does to its surroundings."""
