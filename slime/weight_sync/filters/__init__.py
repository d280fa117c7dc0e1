"""How the weights of an update are changed on their way, one filter after another."""
