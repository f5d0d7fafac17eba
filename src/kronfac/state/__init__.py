"""Everything that is kept for a layer, how it is saved, and where time goes."""
