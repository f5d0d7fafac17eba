"""Recipes: TOML files that say what is trained and how."""
