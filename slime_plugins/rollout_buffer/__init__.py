"""Trajectories that other programs make, collected by a service, as a rollout function."""
