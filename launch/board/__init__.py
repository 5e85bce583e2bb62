"""What a person sees of a run: the live view, ``tandem status``, and the report at its end."""
