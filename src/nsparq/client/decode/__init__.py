"""From the body of a message to a value of a declared type."""
