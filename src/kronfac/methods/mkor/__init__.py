"""MKOR (Mozaffari, Li, Zhang & Mehri Dehnavi 2023): inverses of the factors by rank-one updates."""
