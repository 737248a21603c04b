"""Training: the Lightning module and what surrounds it. `run.run` is the way in."""
