"""Functions for scripts and notebooks, which no run of Tandem calls."""
