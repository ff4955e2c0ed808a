"""Access: users, passwords, and what each client may do. Independent of protocols."""
