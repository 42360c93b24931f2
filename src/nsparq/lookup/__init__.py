"""nsqlookupd: the directory of topics and the nsqds that have them."""
