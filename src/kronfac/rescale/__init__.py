"""How long a step is: rules by layer, factors by rule, and the quadratic model."""
