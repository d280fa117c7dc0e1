"""A program of its own whose trajectories are trained on, by way of the rollout buffer."""
