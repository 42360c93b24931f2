"""Who may do what: permissions, and the auth servers and policy file that grant them."""
