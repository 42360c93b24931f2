"""nsqadmin: the pages and the JSON API about a whole cluster. It keeps nothing that matters."""
