"""Tables to which a round is committed as a whole or not at all."""
