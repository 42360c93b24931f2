"""The whole stack with one command: nsqlookupd, nsqd, nsqadmin and pipelines as supervised child processes.

`nsparq up` is `main`; a program that wants the same (the demo does) makes a `members.Plan` and runs a
`stack.Stack`.
"""
