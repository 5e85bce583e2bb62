"""What `tandem evaluate` is made of: its plan, the work on it here or by a fleet, and its report."""
