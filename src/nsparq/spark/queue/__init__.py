"""Queue mode: reading a channel of any nsqd, also one that keeps no log."""
