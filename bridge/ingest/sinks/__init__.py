"""Tables that a round can be committed to, all at once or not at all."""
