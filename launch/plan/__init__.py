"""Estimates on paper: what a run's processes will hold in memory and how long a step will take."""
