"""Arms of one job, measured in turns, with a verdict that can say "inconclusive"."""
