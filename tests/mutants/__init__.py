"""Mutation testing: small changes of the product's code, and which of them the tests see.

`operators` makes the mutants of a file, most of them with mutmut's operators. `reached` knows which tests run
which lines: recorded once, for every process that the tests start, and kept in `reached.json.xz`. `__main__`
takes a sample, runs the tests that reach each mutant, and prints what survived. A survivor is either
equivalent, or a hole in the tests.
"""
