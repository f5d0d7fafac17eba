"""Solving the layers that are due on one rank, in batches of equal shape."""
