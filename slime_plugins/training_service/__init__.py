"""A service that trains and samples the adapters of a run for programs elsewhere; see `__main__`."""
