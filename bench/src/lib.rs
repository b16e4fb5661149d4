//! Benchmarks: ours beside the machine's own limit. None is written yet; a benchmark is a program, never an assertion in a
//! test.
