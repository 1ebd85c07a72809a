"""Differential checks of a spec and its backends against NumPy."""
