"""Predicts the cost of each scheme on a network and ranks of known speed, and chooses the cheapest."""
