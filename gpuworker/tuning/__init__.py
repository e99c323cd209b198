"""Options for a handler and its traffic: measured run times (measure.py), simulated candidates (search.py), what to expect of the best (prediction.py)."""
