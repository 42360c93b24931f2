"""Message bodies into columns."""
