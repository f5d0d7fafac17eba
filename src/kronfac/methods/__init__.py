"""One file per approximation: the mathematics of one layer."""
