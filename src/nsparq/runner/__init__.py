"""`nsparq run`: the subscriptions of a program in supervised worker processes.

main        the command
supervisor  starts the workers, restarts the dead, replaces all on a reload, stops all;
            reports to systemd, and over HTTP at /ready, /live and /metrics
worker      a worker process: loads the program, consumes, and reports its figures
watch       finds changed files, for --reload
"""
