"""What a run leaves behind: its folder, logs and tables."""
