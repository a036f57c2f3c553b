"""Plain-torch forms of every operation: the right answer on the CPU, and what the kernels are compared with."""
