"""On paper: what a run's parts will hold in memory and how long a step will take."""
