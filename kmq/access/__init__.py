"""Who may do what: tokens, roles, certificates."""
