"""What nsqadmin knows of the cluster: asking the daemons, merging, history."""
