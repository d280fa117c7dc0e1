"""A model that walks over a frozen lake, an environment of Gymnasium."""
