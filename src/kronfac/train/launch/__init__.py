"""Starting ranks on this machine, joining them, and ending them together."""
