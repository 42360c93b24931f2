"""What Spark's processes ask of nsqd and nsqlookupd, over HTTP."""
