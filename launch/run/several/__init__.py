"""Several runs from one command: stages one after another, and sweeps."""
