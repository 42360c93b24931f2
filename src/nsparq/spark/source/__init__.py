"""Log mode: reading topics as batches and streams, exactly once."""
