"""`make demo` and `make up`: a shop whose events go through the whole stack, which runs as it does for users.

`python -m nsparq.demo` pushes a day's events through it, checks that every one of them is where it belongs,
and shows the result. `python -m nsparq.demo up` leaves the stack running, with events trickling in.
"""
