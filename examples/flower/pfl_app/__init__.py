"""A Flower app whose clients end with models of their own."""
