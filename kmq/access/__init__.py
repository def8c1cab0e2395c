"""Access control: tokens, roles, certificates."""
