"""Modules that compute in a trace what they compute in eager, where torch runs other code while it traces."""
