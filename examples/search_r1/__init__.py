"""A model that looks things up in a local index before it answers."""
