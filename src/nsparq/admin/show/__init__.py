"""What nsqadmin shows: pages, forms and the JSON API."""
