"""Evaluations as Redis and files hold them."""
