"""What nsqadmin knows of the cluster, from the daemons up.

upstream    the HTTP client
fields      reads JSON that is not trusted
merge       the /stats of several nsqds as one JSON, in NSQ's shapes
cluster     asks the daemons, all at once: topics, nodes, statistics
messages    peeks into topics and channels
watch       the poll loop; gather merges its figures, history keeps them
pipelines   the poll loop for runners of Spark pipelines
"""
