"""Which rank does what: schemes, grids, costs and balance."""
