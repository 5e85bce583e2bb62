"""Brings data from parquet files into Redis: read, checked and tokenised in a process of its own."""
