"""Ways of weights to engines."""
