"""Who holds which part of a sharded model, and which layers are worked on by slices."""
