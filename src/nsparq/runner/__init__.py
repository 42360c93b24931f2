"""`nsparq run`: the subscriptions of a program in supervised worker processes.

main        the command
supervisor  starts the workers, restarts the dead, replaces all on a reload, stops all
worker      a worker process: loads the program, consumes, and reports its figures
status      /ready, /live and /metrics over HTTP, and systemd's notifications
watch       finds changed files, for --reload
"""
