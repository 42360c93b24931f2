"""`make demo` and `make up`: the events of a made-up shop go through the whole stack.

`python -m nsparq.demo` (run.py) sends a day of events through the stack, checks that every event
arrived exactly once, and shows the result. `python -m nsparq.demo up` (live.py) leaves the stack
running, with a slow stream of events.

events      generates the events, and counts what must come out
sending     sends them to nsqd
watching    asks the daemons for their progress
results     reads what came out, and compares
show, chart print it, and draw it
steps       the Python step of the pipeline in shop.toml
"""
