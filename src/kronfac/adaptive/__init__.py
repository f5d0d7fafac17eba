"""Values that adapt themselves: the damping and the refresh interval."""
