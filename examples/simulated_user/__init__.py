"""A model at a service desk, and a customer whom a second model plays."""
