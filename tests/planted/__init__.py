"""Eighty defects that are planted in the code to see what finds them: `python -m tests.planted`.

They are in `defects.toml`. Each is one line that a careful engineer could have written, and that breaks a
promise of the documentation.
"""
