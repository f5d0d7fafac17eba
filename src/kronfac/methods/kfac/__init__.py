"""K-FAC (Martens & Grosse 2015), and the unit-wise Fisher of norm layers."""
