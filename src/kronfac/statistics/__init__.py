"""Running averages, and what has been observed since the last step."""
