"""`nsparq up`: nsqlookupd, nsqd, nsqadmin and pipelines as supervised child processes.

main        the command
stack       starts the members in order, restarts the dead, stops all; also used by the demo
members     the members: their command lines, their ports, the check that they answer
process     a child process and its output; child is its first code, pipelines its code for Spark
ports       which port each member gets, and whether it is free
output      prints the children's lines with their names in front
"""
