"""What a scheme will cost on a network and ranks of known speed, and which one costs least."""
