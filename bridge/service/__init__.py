"""The running service: start, ready, reload, drain, stop."""
