"""Writing rows to topics: tasks stage them, the driver commits them."""
