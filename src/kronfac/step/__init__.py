"""One step: reduce, refresh, share, precondition, rescale, spread."""
