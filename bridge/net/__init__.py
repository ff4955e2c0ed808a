"""What listeners share: limits of connections, memory of strangers, fair turns. Knows no protocol."""
