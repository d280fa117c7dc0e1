"""What is looked at before a run starts: files, checkpoints, served models, code of users."""
