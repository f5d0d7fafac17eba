"""EKFAC (George et al. 2018): second moments of gradients in K-FAC's eigenbasis."""
