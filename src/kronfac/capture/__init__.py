"""Hooks that watch a model, eager or compiled."""
