"""The miniature: a small, real task on which the whole system learns on two CPU cores."""
