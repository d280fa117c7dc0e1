"""A model that plays a game against what it was some rollouts ago."""
