"""Importance weights against the mismatch of trainer and engine, by a function of the user's."""
