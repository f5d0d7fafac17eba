"""SINGD (Lin et al. 2024): K-FAC without inverses, in structured matrices, with INGD and IKFAC."""
