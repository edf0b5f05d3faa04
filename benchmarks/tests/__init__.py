"""The benchmarks' own instruments are tested too: a wrong ruler measures nothing."""
