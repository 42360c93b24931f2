"""Published NSQ clients and our own, each in a process that publishes and consumes for as long as
it runs.

    python -m … NSQLOOKUPD TOPIC NSQD…

A driver publishes one message after the other, and asks for a new one when an answer does not come
within ANSWER_S. It prints `acknowledged BODY` and `received ID BODY`. It stops publishing when its
standard input ends, and goes on consuming until it is killed.
"""
