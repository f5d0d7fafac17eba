"""Optimizers of a recipe, and their schedules."""
