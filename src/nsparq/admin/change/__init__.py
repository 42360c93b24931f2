"""What nsqadmin changes in the cluster."""
