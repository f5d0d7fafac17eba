"""The program: recipes, data, models and the loop that trains them."""
