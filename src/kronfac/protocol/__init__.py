"""The contract between methods and the engine."""
