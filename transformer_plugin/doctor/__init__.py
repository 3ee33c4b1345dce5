"""``python -m transformer_plugin``: whether this installation is right, and why not.

The process that writes the report imports the standard library alone. Whatever may fail, end the process or never
return runs in processes of its own, which are ended after a time:

- ``program``: the command line, and which facts are asked for in which order.
- ``report``: facts, and how they are written.
- ``child``: a function in a process of its own.
- ``machine``, ``installation``: the system, and the files of the package.
- ``_of_driver``, ``_of_torch``: files that a child runs as programs. They import nothing of this package, which may not
  be importable.
- ``package``, ``values``, ``peers``: what a child imports with the package: which kernels run, whether they give the
  stored values, and whether GPUs share memory.
"""
