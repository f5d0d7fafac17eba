"""One run: its parts, its loop, its checkpoints."""
