"""One file per recipe: a config and a class, each a `torch_dcl.experiments.protocol.Recipe`.

The file's name is the recipe's, with ``_`` for ``-``; the first line of its docstring says what it runs.
"""
