"""The processes of a run: what is started for each part, and who keeps them alive."""
