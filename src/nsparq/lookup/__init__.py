"""nsqlookupd: the directory of who produces which topic."""
