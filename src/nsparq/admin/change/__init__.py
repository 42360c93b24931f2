"""What nsqadmin changes in the cluster, for the forms and the JSON API.

actions     NSQ's changes; the audit log and notifications, for all changes
operations  publish, copy, move and replay, with their checks
messages    the requests to nsqd behind publish, copy and move
"""
