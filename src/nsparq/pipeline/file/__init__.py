"""What a pipeline file says: reading it, checking it, building it from Python."""
