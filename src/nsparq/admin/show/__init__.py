"""What nsqadmin shows.

pages       a handler for each page; templates/ has the HTML, static/ the script and the style sheet
forms       the POSTs of the pages, and the login
templating  the template engine, its filters, the static files
api/        the JSON API
"""
