"""nsqadmin: the pages and the JSON API for a whole cluster. It keeps nothing on disk.

A poll, every few seconds: collect/watch.py asks each nsqd for /stats through collect/cluster.py,
collect/gather.py merges the answers, collect/history.py keeps them for the charts. health.py finds
the problems that the overview shows.

A page view: routing.py finds the endpoint, security.py checks the user, show/pages.py collects the
data, from the last poll or by asking the nodes, and renders a template. The script on the page
refreshes it and draws the charts from /api/history. The JSON API in show/api/ works the same way.

A POST of a form goes to /act in show/forms.py. It checks the permission and the confirmation, and
calls change/actions.py or change/operations.py. They change the daemons, write an audit line to the
log and notify. The browser is redirected to a page with the outcome.

main.py     the command
daemon.py   puts the parts together; start and stop
options.py  the flags
collect/    what nsqadmin knows of the cluster
change/     what it changes there
show/       pages, forms and JSON API
"""
