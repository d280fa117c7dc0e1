"""The console command ``slime``."""
