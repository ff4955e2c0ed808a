"""Access: users, passwords, and what each client may do. Knows no protocol."""
