"""Sixty defects planted in the code, and what finds them: `python -m tests.planted`.

`defects.toml` has the defects. Each is one line of code that a careful engineer could write, and that breaks
a promise of the documentation.
"""
