"""Curvature from per-sample gradients: what methods that solve among samples share."""
