"""The names and signatures of other libraries over the classes of this one, a module for each library."""
