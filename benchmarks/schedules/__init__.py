"""Studies of scheduled programs: unseen tasks, networks and configurations, and choices of training."""
